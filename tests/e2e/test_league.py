"""Self-play on the real engine: members are the very selves that joined, are never trained, and outlive the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import agentlightning as agl
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.trainer.example import example_dir, load_example
from agentlightning.types import Call

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

game, agents = load_example("bidding", "game"), load_example("bidding", "bidding_agent")
MODEL = str(example_dir("bidding", "game") / "model")


async def train(run_dir: Path, steps: int, **more: Any) -> list[dict[str, Any]]:
    algorithm = agl.GRPO(
        model=MODEL,
        league=agl.League(draw="latest", size=2, every=1),
        steps=steps,
        tasks_per_step=4,
        group_size=4,
        learning_rate=5e-3,
        max_context=256,
        save_every=1,
    )
    duels, against_rules = game.make_duels()
    trainer = agl.Trainer(algorithm=algorithm, run_dir=run_dir, concurrency=32, console=SilentConsole(), **more)
    await trainer.fit_async(agents.duel, duels, against_rules[:4])
    return read_metrics(run_dir / "metrics.jsonl")


def gap(model: Any, call: Call) -> float:
    """Largest difference of a call's log-probs from those of a plain forward."""
    import torch

    ids = torch.from_numpy(np.concatenate([call.prompt_ids, call.response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1].log_softmax(-1)
    found = logprobs.gather(1, ids[0, len(call.prompt_ids) :, None])[:, 0].numpy()
    return float(np.abs(found - call.plain_logprobs).max())


async def test_members_are_the_selves_that_joined_and_a_resumed_run_goes_on_with_them(tmp_path: Path) -> None:
    from peft import PeftModel

    from agentlightning.learner.policy import load_base, peft_calls_deprecated_names

    run = tmp_path / "run"
    await train(run, steps=2)
    rows = await train(run, steps=4, resume=run)
    assert [m["step"] for m in rows if m["step"]] == [1, 2, 3, 4]
    played = [name.split("/")[1] for m in rows for name in m if name.startswith("opponent/")]
    assert played == ["start", "step-1", "step-2", "step-3"], "the newest each time, across the resume"

    store = SqliteLightningStore(run / "store.db")
    rollouts = await store.query_rollouts(limit=-1)
    calls = await store.query_calls([rollout.rollout_id for rollout in rollouts])
    await store.close()
    seen: dict[str, int] = {}
    for rollout in rollouts:
        name = str(rollout.metadata.get("opponent_name", ""))
        for call in calls[rollout.rollout_id] if name else ():
            assert call.info.trained == (call.info.policy == "player")
            if call.info.policy == "player" or seen.get(name, 0) >= 3:
                continue
            seen[name] = seen.get(name, 0) + 1
            model: Any = load_base(MODEL, "float32").eval()
            if name != "start":
                folder = run / "league" / f"step-{int(name.removeprefix('step-')):06d}"
                with peft_calls_deprecated_names():
                    model = PeftModel.from_pretrained(model, folder).eval()
            assert gap(model, call) < 1e-4, (name, call.info.policy)
    assert seen.keys() == {"start", "step-1", "step-2", "step-3"}
