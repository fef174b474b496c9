"""`agl eval` measures under the limits that the model was trained under."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.cli.evaluate import measure, resolve
from agentlightning.models import resolve_model
from agentlightning.trainer.example import load_example
from agentlightning.trainer.live import RUN_FILE
from tests.cli.test_export_model import make_checkpoint

client = AsyncOpenAI(base_url=agl.GATEWAY_URL, api_key="any", max_retries=0)


@agl.rollout
async def asks_twice(task: dict[str, Any], llm: agl.LLM) -> float:
    for _ in range(2):
        await client.chat.completions.create(model=llm.model, **load_example("calc", "recipe").request())
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("settings", "reward"), [({}, 1.0), ({"max_calls": 1, "max_context": 512}, 0.0)])
def test_a_rollout_ends_where_it_ended_in_training(tmp_path: Path, settings: dict[str, Any], reward: float) -> None:
    run = tmp_path / "run"
    make_checkpoint(run, Path(resolve_model("calc")))
    (run / RUN_FILE).write_text(json.dumps({"settings": {"steps": 3, "learning_rate": 1.0, **settings}}))
    trained, base, _ = resolve(run)
    assert base is not None
    for served in (trained, base):
        assert served.spec.model.max_context == settings.get("max_context", agl.GRPO.max_context)
    found = measure(trained, asks_twice, [{}])
    assert (found.rewards, found.failed, found.truncated) == ([reward], 0, int(not reward))
