"""Two policies with opposite rewards on one base in one run: both learn, and the base beside them stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.cli.example import load_example
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types import Call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SETTINGS: dict[str, Any] = {
    "model": "calc",
    "policies": ["solver", "sceptic"],
    "frozen": "base",
    "lora_rank": 8,
    "learning_rate": 3e-3,
    "tasks_per_step": 8,
    "group_size": 8,
    "max_context": 512,
    "save_every": 5,
    "certify_every": 5,
}
EXACT = 5e-5


@agl.rollout
async def three_agents(task: dict[str, Any], llm: agl.LLM) -> None:
    """The solver is paid for right answers, the sceptic for answers without the tool; nobody pays the base."""
    calc = load_example("calc", "calc_agent")
    chat = calc.client.with_options(base_url=llm.endpoint, api_key=llm.api_key).chat.completions
    first = [{"role": "system", "content": calc.SYSTEM_PROMPT}, {"role": "user", "content": task["question"]}]
    shared: dict[str, Any] = {"tools": [calc.CALC_TOOL], "max_tokens": 64}
    messages: list[Any] = list(first)
    right = 0.0
    for _ in range(calc.MAX_TURNS):
        message = (await chat.create(model="solver", messages=messages, **shared)).choices[0].message
        if not message.tool_calls:
            right = calc.score(message.content or "", task["answer"])
            break
        messages.append(message)
        for call in message.tool_calls:
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": calc.calculate(call.function.arguments)}
            )
    doubt = (await chat.create(model="sceptic", messages=first, **shared)).choices[0].message
    await chat.create(model="base", messages=first, **shared)
    agl.emit_reward(right, agent="solver")
    agl.emit_reward(0.0 if doubt.tool_calls else 1.0, agent="sceptic")


async def train(folder: Path, store: SqliteLightningStore, steps: int, **more: Any) -> list[dict[str, Any]]:
    algorithm = agl.GRPO(**SETTINGS, steps=steps)
    run_dir = folder / "run"
    trainer = agl.Trainer(
        algorithm=algorithm, run_dir=run_dir, store=store, concurrency=64, console=SilentConsole(), **more
    )
    await trainer.fit_async(three_agents, load_example("calc", "recipe").train_tasks())
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

    store = SqliteLightningStore(tmp_path / "store.db")
    await train(tmp_path, store, steps=10)
    rows = await train(tmp_path, store, steps=15, resume=tmp_path / "run")
    assert [m["step"] for m in rows] == list(range(1, 16))
    for name in ("solver", "sceptic"):
        rewards = [m[f"{name}/reward"] for m in rows]
        assert mean(rewards[-4:]) > mean(rewards[:4]) + 0.15, (name, rewards)
        assert [m[f"{name}/version"] for m in rows] == list(range(1, 16))
        assert max(m[f"{name}/logprob_gap_max"] for m in rows) < 1e-4
        assert max(m.get(f"{name}/certificate_gradients", 0.0) for m in rows) < 1e-3
    calls = await calls_by_policy(store)
    base = load_base(resolve_model("calc"), "float32").eval()
    assert {run.version for call in calls["base"] for run in call.versions} == {0}
    assert not any(call.info.trained for call in calls["base"])
    assert max(gap(base, call) for call in [*calls["base"][:20], *calls["base"][-20:]]) < EXACT
    for name in ("solver", "sceptic"):
        assert mean([gap(base, call) for call in calls[name][-20:]]) > 0.1, "it moved away from the base"
        weights = tmp_path / "run" / "checkpoints" / "step-000015" / "model" / name
        with peft_calls_deprecated_names():
            adapter = PeftModel.from_pretrained(load_base(resolve_model("calc"), "float32"), weights).eval()
        assert gap(adapter, calls[name][-1]) > 0  # sampled a step before the checkpoint
    await store.close()
