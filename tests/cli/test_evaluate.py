"""`agl eval` measures under the limits that the model was trained under."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.cli.commands.train import EvalOptions
from agentlightning.cli.evaluate import (
    _evaluate,  # pyright: ignore[reportPrivateUsage]
    _sentence,  # pyright: ignore[reportPrivateUsage]
    measure,
    resolve,
)
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


@pytest.mark.slow
@pytest.mark.parametrize("base", [None, "calc"])
def test_a_model_that_no_run_has_trained_is_not_called_trained(
    base: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, tasks = tmp_path / "agent.py", tmp_path / "tasks.jsonl"
    agent.write_text("def agent(task, llm):\n    return 1.0\n")
    tasks.write_text("{}\n")
    given = EvalOptions(checkpoint=Path("calc"), agent=f"{agent}:agent", tasks=tasks, base=base, as_json=True)
    _evaluate(Path("calc"), given)
    shown = json.loads(capsys.readouterr().out)
    labels = {"model"} if base is None else {"base", "model"}
    assert {label for label, name in shown["models"].items() if name is not None} == labels
    assert shown["estimates"]["mean reward"].keys() - {"gain"} == shown["uncalled"].keys() == labels


@pytest.mark.parametrize(("low", "high", "word"), [(0.1, 0.2, "better"), (-0.2, -0.1, "worse")])
def test_what_is_compared_with_the_base_has_its_name(low: float, high: float, word: str) -> None:
    assert f"The model is {word} than the base in" in _sentence("mean reward", "model", low, high, 20)
    assert f"The trained model is {word} than its base in" in _sentence("mean reward", "trained", low, high, 20)
