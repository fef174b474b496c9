"""Rare successes are gone on from: which, what is learned from them, and a whole run that is resumed."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.continuations import with_continuations
from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.algorithm.episode import collect
from agentlightning.errors import ConfigError
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types.recording import EXPLORED, FORK_OF
from tests.algorithm.test_branches import REWARDS, TASKS, THETA, fork_of, likelihood, one, score, walked
from tests.algorithm.test_credit import episode

RULE = CreditRule(advantage="rloo", normalization="sum")


def test_continuations_of_a_state_have_the_weight_of_a_rollout_and_are_compared_with_each_other() -> None:
    good, bad = (episode("g", [(r, 2)], tokens=(1, 1, 1), name=name) for name, r in (("a", 1.0), ("b", 0.0)))
    forks = {2: [fork_of(good, 2, r, n) for n, r in enumerate((1.0, 0.0, 0.25))]}
    batches = credit([good, bad], RULE)
    (batch,) = with_continuations(batches, [good, bad], RULE, {"a": forks}, with_their_rollout=False)
    before = {c.call.info.call_id: (float(c.weights[0]), float(c.advantages[0])) for c in batches[0]}
    after = {c.call.info.call_id: (float(c.weights[0]), float(c.advantages[0])) for c in batch}
    assert before.items() <= after.items(), "the rollout itself counts as it did"
    weight = before["a-2"][0]
    new = {name: value for name, value in after.items() if name not in before}
    assert new == {
        "a-2-0-2": pytest.approx((weight / 3, 1.0 - 0.125)),
        "a-2-1-2": pytest.approx((weight / 3, 0.0 - 0.625)),
        "a-2-2-2": pytest.approx((weight / 3, 0.25 - 0.5)),
    }


@pytest.mark.slow
def test_what_is_learned_is_the_gradient_of_the_values_of_these_states() -> None:
    """On the chain of three choices: rollouts that earned 0.9 or more are gone on from before their last choice."""
    random = np.random.default_rng(5)
    found = np.zeros((1500, len(THETA)))
    for g in range(len(found)):
        paths = [walked(random) for _ in range(2)]
        roots = [episode("g", [(REWARDS[p], 2)], tokens=(1, 1, 1), name=f"r{n}") for n, p in enumerate(paths)]
        known, going_on = {root.rollout.rollout_id: p for root, p in zip(roots, paths, strict=True)}, {}
        for root, path in zip(roots, paths, strict=True):
            if REWARDS[path] >= 0.9:
                ends = [walked(random, path[:2]) for _ in range(3)]
                forks = [fork_of(root, 2, REWARDS[end], n) for n, end in enumerate(ends)]
                known |= {fork.rollout.rollout_id: end for fork, end in zip(forks, ends, strict=True)}
                going_on[root.rollout.rollout_id] = {2: forks}
        batches = credit(roots, replace(RULE, keep_flat=True))
        (batch,) = with_continuations(batches, roots, RULE, going_on, with_their_rollout=False)
        for c in batch:
            name, t = c.call.info.call_id.rsplit("-", 1)
            found[g] += float(c.weights[0] * c.advantages[0]) * score(known[name], int(t))
    reward = sum(likelihood(p) * r * sum(score(p, t) for t in range(3)) for p, r in REWARDS.items())
    states = np.zeros(len(THETA))
    for path, earned in REWARDS.items():
        if earned >= 0.9:  # the gradient of V in the state before its last choice, as often as it is gone on from
            for last in (0, 1):
                end = (*path[:2], last)
                likely = one(path[:2]) if last else 1 - one(path[:2])
                states += likelihood(path) * likely * REWARDS[end] * score(end, 2)
    errors = np.abs(found.mean(0) - (reward + states)) / np.maximum(found.std(0) / np.sqrt(len(found)), 1e-12)
    assert errors.max() < 3.5
    assert np.abs(states).max() > 5 * (found.std(0) / np.sqrt(len(found))).max(), (
        "it would be seen if it were not there"
    )


# ---- whole runs ------------------------------------------------------------------------------------------------------


def rare() -> agl.LitAgent[Any]:
    """Three turns; the first rollout of each task alone succeeds if its last answer is long enough to be heard."""
    count: dict[str, int] = {}

    @agl.rollout
    async def talks(task: dict[str, Any], llm: agl.LLM, rollout: agl.Rollout) -> float:
        said = [{"role": "user", "content": task["question"]}]
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            for turn in range(3):
                messages: Any = said
                done = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
                said += [{"role": "assistant", "content": done.choices[0].message.content or ""}]
                said += [{"role": "user", "content": f"{turn}+1"}]
        if FORK_OF in rollout.metadata:
            return float(len(said[5]["content"]) % 2)
        count[task["question"]] = count.get(task["question"], 0) + 1
        return float(count[task["question"]] % 4 == 1)

    return talks


def trained(folder: Path, **settings: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"steps": 2, "tasks_per_step": 2, "group_size": 4, "explore": "fork_successes"}
    given |= {"val_every": 0, "backend": "inprocess", "explore_forks": 3, **settings}
    algorithm = agl.GRPO(model="calc", **given)
    agl.Trainer(algorithm=algorithm, run_dir=folder, concurrency=8, console=SilentConsole()).fit(rare(), TASKS)
    return [row for row in read_metrics(folder / "metrics.jsonl") if row.get("step")]


@pytest.mark.slow  # test_branches.py has a whole run that goes on from states
@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_few_good_rollouts_are_gone_on_from(tmp_path: Path, max_staleness: int) -> None:
    rows = await asyncio.to_thread(trained, tmp_path / "run", max_staleness=max_staleness)
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    rollouts = await store.query_rollouts(limit=-1)
    read = {e.rollout.rollout_id: e for e in await collect(store, [r.rollout_id for r in rollouts])}
    forks = [e for e in read.values() if FORK_OF in e.rollout.metadata]
    for step, row in enumerate(rows, 1):
        mine = [e for e in read.values() if e.rollout.metadata["step"] == step and FORK_OF not in e.rollout.metadata]
        good = [e for e in mine if e.reward == 1.0]
        assert row["explore/states"] == len(good) > 0
        assert row["explore/forks"] == 3 * len(good)
        assert row["explore/lost"] == 0
        assert row["rollouts"] == len(mine), "continuations are no rollouts of the step's tasks"
    for fork in forks:
        root = read[fork.rollout.metadata[FORK_OF]]
        assert root.reward == 1.0
        assert fork.rollout.metadata["at"] == 2, "before its last turn"
        assert fork.rollout.rollout_id in root.rollout.metadata[EXPLORED]["trained"]
        assert [c.info.trained for c in fork.calls] == [False, False, True]
    await store.close()


@pytest.mark.slow
def test_where_successes_are_not_few_nothing_is_done(tmp_path: Path) -> None:
    rows = trained(tmp_path / "run", explore_below=0.2, steps=1)
    assert rows[0]["explore/states"] == 0


@pytest.mark.slow
def test_what_continuations_sampled_changes_the_weights(tmp_path: Path) -> None:
    """Two deterministic runs that differ in nothing else."""
    norms = [
        trained(tmp_path / str(n), deterministic=True, steps=1, **{"explore": how, "explore_forks": forks})[0][
            "grad_norm"
        ]
        for n, (how, forks) in enumerate([("fork_successes", 3), ("fork_successes", 3), ("fork_successes", 2)])
    ]
    assert norms[0] == norms[1] != norms[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"credit": "branches", "advantage": "rloo"}, "credit='branches'"),
        ({"advantage": "reinforce"}, "advantage='reinforce'"),
        ({"group_judge": {"model": "m", "base_url": "http://127.0.0.1:1/v1"}}, "group_judge"),
        ({"policies": ("a", "b"), "lora_rank": 4}, "several policies"),
        ({"explore_forks": 1}, "explore_forks"),
        ({"explore": "always"}, "fork_successes"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        agl.GRPO(**{"model": "calc", "explore": "fork_successes", **settings})


@pytest.mark.parametrize("setting", ["explore_below", "explore_forks", "explore_back"])
def test_its_settings_need_it(setting: str) -> None:
    given: dict[str, Any] = {setting: 2 if setting != "explore_below" else 0.5}
    with pytest.raises(ConfigError, match="explore='fork_successes'"):
        agl.GRPO(model="calc", **given)
