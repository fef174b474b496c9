"""Two policies with opposite rewards on one base in one run: both learn, and the base beside them stays as it is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.cli.evaluate import measure, resolve
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer.example import load_example
from agentlightning.types import Call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

example = load_example("two_policies", "team")
SETTINGS: dict[str, Any] = {**example.SETTINGS, "save_every": 5, "check_packing_every": 5}
EXACT = 5e-5


async def train(run_dir: Path, steps: int, **more: Any) -> list[dict[str, Any]]:
    algorithm = agl.GRPO(**SETTINGS, steps=steps)
    trainer = agl.Trainer(algorithm=algorithm, run_dir=run_dir, concurrency=64, console=SilentConsole(), **more)
    await trainer.fit_async(example.team, load_example("calc", "recipe").train_tasks())
    return read_metrics(run_dir / "metrics.jsonl")


def gap(model: Any, call: Call) -> float:
    """Largest difference of a call's log-probs from those of a plain forward."""
    import torch

    ids = torch.from_numpy(np.concatenate([call.prompt_ids, call.response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
    found = logprobs.gather(1, ids[0, len(call.prompt_ids) :, None])[:, 0].numpy()
    return float(np.abs(found - call.plain_logprobs).max())


async def calls_by_policy(store: SqliteLightningStore) -> dict[str, list[Call]]:
    rollouts = await store.query_rollouts(limit=-1)
    found: dict[str, list[Call]] = {}
    for calls in (await store.query_calls([rollout.rollout_id for rollout in rollouts])).values():
        for call in calls:
            found.setdefault(call.info.policy, []).append(call)
    return {name: sorted(calls, key=lambda c: c.info.start_time) for name, calls in found.items()}


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


async def test_both_learn_the_base_does_not_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    from peft import PeftModel

    from agentlightning.learner.policy import load_base, peft_calls_deprecated_names
    from agentlightning.models import resolve_model

    run = tmp_path / "run"
    await train(run, steps=6)
    rows = await train(run, steps=10, resume=run)
    assert [m["step"] for m in rows] == list(range(1, 11))
    store = SqliteLightningStore(run / "store.db")
    calls = await calls_by_policy(store)
    await store.close()
    base = load_base(resolve_model("calc"), "float32").eval()
    for name in ("solver", "sceptic"):
        rewards = [m[f"{name}/reward"] for m in rows]
        assert mean(rewards[-3:]) > mean(rewards[:2]) + 0.2, (name, rewards)
        assert max(m.get(f"{name}/logprob_gap_max", 0.0) for m in rows) < 1e-4
        assert 0 < max(m.get(f"{name}/packing_gap_gradients", 0.0) for m in rows) < 1e-3
        decisions = [call for call in calls[name] if call.info.parent_call_id is None]  # the tool, or no tool
        assert mean([gap(base, call) for call in decisions[-20:]]) > 0.1, "it moved away from the base"
        version = max(m.get(f"{name}/version", 0) for m in rows[:6])
        sampled = [call for call in calls[name] if [part.version for part in call.versions] == [version]]
        with peft_calls_deprecated_names():
            weights = run / "checkpoints" / "step-000006" / "model" / name
            adapter = PeftModel.from_pretrained(load_base(resolve_model("calc"), "float32"), weights).eval()
        assert max(gap(adapter, call) for call in sampled[:20]) < EXACT, "what was resumed is what plain peft loads"
    trained, untrained, _ = resolve(run)
    assert untrained is not None
    tasks = load_example("calc", "recipe").test_tasks()[:24]
    before, after = [(await asyncio.to_thread(measure, s, example.team, tasks)).rewards for s in (untrained, trained)]
    assert mean(after) > mean(before) + 0.2, "agl eval finds the improvement"
    assert {part.version for call in calls["base"] for part in call.versions} == {0}
    assert not any(call.info.trained for call in calls["base"])
    assert max(gap(base, call) for call in [*calls["base"][:20], *calls["base"][-20:]]) < EXACT
