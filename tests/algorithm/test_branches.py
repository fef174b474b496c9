"""Credit by branches: what calls get, that the gradient stays that of the reward, and continuations in whole runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI

import agentlightning as agl
from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.continuations import with_continuations
from agentlightning.algorithm.credit.modes import CREDIT_MODES
from agentlightning.algorithm.credit.units import CreditRule, Unit, known_states, state_values
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.dashboard.groups import advantages_of
from agentlightning.errors import ConfigError
from agentlightning.learner.packing import CreditedCall
from agentlightning.metrics import SilentConsole, read_metrics
from agentlightning.store import SqliteLightningStore
from agentlightning.types import Rollout
from agentlightning.types.recording import FORK_OF, STATES, recording_in
from tests.algorithm.test_credit import advantages, episode

RLOO = CreditRule(mode="branches", advantage="rloo")


def known(**values: float) -> dict[str, Any]:
    return {name.replace("_", "-"): np.full(2, value, np.float32) for name, value in values.items()}


def test_a_call_is_worth_the_next_known_value_less_the_last_one() -> None:
    group = [episode("g", [(1.0, 3)], tokens=(2, 2, 2, 2)), episode("g", [(0.0, 0)], tokens=(2,))]
    group += [episode("g", [(0.5, 1)], tokens=(2, 2))]
    found = advantages(group, RLOO, values=known(r0_1=0.75, r0_3=0.5, r2_1=0.25))
    baseline = (0.0 + 0.5) / 2
    assert found[0] == pytest.approx([0.75 - baseline, 0.5 - 0.75, 0.5 - 0.75, 1.0 - 0.5])
    assert found[1] == pytest.approx([0.0 - (1.0 + 0.5) / 2]), "a rollout of which nothing is known is compared whole"
    assert found[2] == pytest.approx([0.25 - 0.5, 0.5 - 0.25])


@pytest.mark.parametrize("advantage", ["rloo", "drgrpo", "grpo"])
def test_what_calls_get_adds_up_to_the_advantage_of_the_rollout(advantage: str) -> None:
    rule = CreditRule(mode="branches", advantage=advantage)
    group = [episode("g", [(r, 2)], tokens=(2, 2, 2)) for r in (1.0, 0.0, 0.25)]
    whole = advantages(group, CreditRule(advantage=advantage))
    parts = advantages(group, rule, values=known(r0_1=0.5, r0_2=0.75, r1_2=0.25))
    assert sum(parts[0]) == pytest.approx(whole[0][0]), "every call is a stretch of its own"
    assert parts[1][0] == parts[1][1], "between two known states all calls get the same"
    assert parts[1][0] + parts[1][2] == pytest.approx(whole[1][0])
    assert parts[2] == whole[2]
    assert advantages(group, rule) == whole, "without a known state it is broadcast, bit for bit"


def test_a_flat_group_teaches_where_states_differ() -> None:
    group = [episode("g", [(1.0, 1)], tokens=(2, 2)) for _ in range(3)]
    found = advantages(group, RLOO, values=known(r0_1=0.5))
    assert found == [[-0.5, 0.5], [0.0, 0.0], [0.0, 0.0]]


# ---- a chain of three binary choices whose values and gradient are known ---------------------------------------------

THETA: dict[tuple[int, ...], float] = dict(
    zip([(), *product((0, 1)), *product((0, 1), repeat=2)], (0.3, -0.5, 0.8, 0.1, -1, 1.2, 0.4), strict=True)
)
"""By what was chosen before: the logit of choosing 1."""
REWARDS: dict[tuple[int, ...], float] = dict(
    zip(product((0, 1), repeat=3), (0.0, 0.9, 0.4, 0.1, 1.0, 0.2, 0.7, 0.0), strict=True)
)
Choose = Callable[[np.random.Generator, tuple[int, ...], int], bool]


def one(history: tuple[int, ...]) -> float:
    return 1 / (1 + np.exp(-THETA[history]))


def likelihood(path: tuple[int, ...]) -> float:
    return float(np.prod([one(path[:t]) if a else 1 - one(path[:t]) for t, a in enumerate(path)]))


def score(path: tuple[int, ...], t: int) -> np.ndarray:
    """The gradient of log p of the choice at t, by logit."""
    found = np.zeros(len(THETA))
    found[list(THETA).index(path[:t])] = path[t] - one(path[:t])
    return found


def walked(random: np.random.Generator, path: tuple[int, ...] = ()) -> tuple[int, ...]:
    while len(path) < 3:
        path = (*path, int(random.random() < one(path)))
    return path


def gradients(choose: Choose, *, groups: int = 2000, size: int = 4, continuations: int = 4) -> np.ndarray:
    """Estimates by group: [groups, logits]."""
    random = np.random.default_rng(7)
    found = np.zeros((groups, len(THETA)))
    for g in range(groups):
        paths = [walked(random) for _ in range(size)]
        values: dict[str, Any] = {}
        for n, path in enumerate(paths):
            for t in (1, 2):
                if choose(random, path, t):
                    earned = [REWARDS[walked(random, path[:t])] for _ in range(continuations)]
                    values[f"{n}-{t}"] = np.array([np.mean(earned)])
        units = [_unit(n, REWARDS[path]) for n, path in enumerate(paths)]
        worths = CREDIT_MODES["branches"].assign(units, RLOO, np.ones(size, bool), values).advantages
        for path, worth in zip(paths, worths, strict=True):
            found[g] += sum((score(path, t) * worth[t] for t in range(3)), np.zeros(len(THETA))) / size
    return found


def _unit(number: int, reward: float) -> Unit:
    calls: Any = [SimpleNamespace(info=SimpleNamespace(call_id=f"{number}-{t}")) for t in range(3)]
    return Unit(number, ("g", None), counts=True, total=reward, rewards_T=[0, 0, reward], calls=calls)


def by_itself(random: np.random.Generator, path: tuple[int, ...], t: int) -> bool:
    return random.random() < 0.5


@pytest.mark.slow
def test_the_gradient_is_that_of_the_reward() -> None:
    exact = sum(likelihood(p) * r * sum(score(p, t) for t in range(3)) for p, r in REWARDS.items())

    def worst(found: np.ndarray) -> float:
        """How many standard errors the mean is from the gradient, at the farthest logit."""
        return float(np.max(np.abs(found.mean(0) - exact) / (found.std(0) / np.sqrt(len(found)))))

    found = gradients(by_itself)
    assert worst(found) < 3.5
    whole = gradients(lambda *_: False)
    assert worst(whole) < 3.5
    assert found.var(0).sum() < 0.8 * whole.var(0).sum(), "and it is nearer in each step"
    afterwards = gradients(lambda _, path, t: path[t] == 1)
    assert worst(afterwards) > 6, "states that are chosen by what was done in them would bend it"


# ---- continuations that are trained, too -----------------------------------------------------------------------------


def fork_of(root: Episode, at: int, reward: float, number: int) -> Episode:
    """A continuation of a rollout of three calls of one token, from the state before its call `at`."""
    made = episode("none", [(reward, 2)], tokens=(1, 1, 1), name=f"{root.rollout.rollout_id}-{at}-{number}")
    calls = [replace(c, info=replace(c.info, trained=n >= at)) for n, c in enumerate(made.calls)]
    return replace(made, calls=calls)


def tree_of(random: np.random.Generator, size: int, continuations: int) -> tuple[list[CreditedCall], dict[str, Any]]:
    """The credit of a group with its continuations, and what was chosen in each rollout."""
    roots, going_on, values, paths = [], {}, {}, {}
    for n in range(size):
        path = walked(random)
        root = episode("g", [(REWARDS[path], 2)], tokens=(1, 1, 1), name=f"r{n}")
        roots.append(root)
        paths[root.rollout.rollout_id] = path
        for t in (1, 2):
            if random.random() < 0.5:
                ends = [walked(random, path[:t]) for _ in range(continuations)]
                forks = [fork_of(root, t, REWARDS[end], number) for number, end in enumerate(ends)]
                going_on.setdefault(root.rollout.rollout_id, {})[t] = forks
                values[root.calls[t].info.call_id] = np.array([np.mean([REWARDS[end] for end in ends])], np.float32)
                paths |= {fork.rollout.rollout_id: end for fork, end in zip(forks, ends, strict=True)}
    rule = replace(RLOO, normalization="sum")
    batches = credit(roots, replace(rule, keep_flat=True), values=values)
    (batch,) = with_continuations(batches, roots, rule, going_on)
    return batch, paths


@pytest.mark.slow  # the gradient without them is quick
def test_the_gradient_with_trained_continuations_is_that_of_the_reward() -> None:
    exact = sum(likelihood(p) * r * sum(score(p, t) for t in range(3)) for p, r in REWARDS.items())
    random = np.random.default_rng(3)
    found = np.zeros((800, len(THETA)))
    for g in range(len(found)):
        batch, paths = tree_of(random, size=3, continuations=3)
        for c in batch:
            name, t = c.call.info.call_id.rsplit("-", 1)
            found[g] += float(c.weights[0] * c.advantages[0]) * score(paths[name], int(t))
    errors = np.abs(found.mean(0) - exact) / (found.std(0) / np.sqrt(len(found)))
    assert errors.max() < 3.5
    alone = gradients(by_itself, groups=800, size=3, continuations=3)
    assert found.var(0).sum() < 0.8 * alone.var(0).sum(), "and nearer than where they only say what states are worth"


def test_a_state_keeps_its_place_however_many_go_on_from_it() -> None:
    root = episode("g", [(1.0, 2)], tokens=(1, 1, 1), name="a")
    other = episode("g", [(0.0, 2)], tokens=(1, 1, 1), name="b")
    forks = {1: [fork_of(root, 1, r, n) for n, r in enumerate((1.0, 0.0, 0.5))], 2: [fork_of(root, 2, 0.25, 0)]}
    batches = credit([root, other], replace(RLOO, keep_flat=True), values={})
    (batch,) = with_continuations(batches, [root, other], RLOO, {"a": forks})
    weights = {c.call.info.call_id: float(c.weights[0]) for c in batch}
    assert {name: weight * 6 for name, weight in weights.items()} == pytest.approx(
        {"a-0": 1, "a-1": 1 / 4, "a-2": 1 / 8, **{f"b-{t}": 1 for t in range(3)}, "a-2-0-2": 1 / 8}
        | {f"a-1-{n}-{t}": 1 / 4 for n in range(3) for t in (1, 2)}
    )
    worths = {c.call.info.call_id: float(c.advantages[0]) for c in batch}
    assert worths["a-1-0-1"] == pytest.approx(1.0 - (1.0 + 0.0 + 0.5) / 3)
    assert worths["a-2-0-2"] == pytest.approx(0.25 - 1.0)
    assert len({c.group for c in batch if c.call.info.call_id.startswith("a")}) == 1, "they share their first tokens"
    assert len({c.sequence for c in batch}) == 6


# ---- whole runs ------------------------------------------------------------------------------------------------------


def agent_of(turns: int, *, clock: bool = False) -> agl.LitAgent[Any]:
    @agl.rollout
    async def talks(task: dict[str, Any], llm: agl.LLM) -> float:
        said, ones = [{"role": "user", "content": task["question"]}], 0
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            for turn in range(turns):
                messages: Any = said
                done = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
                answer = done.choices[0].message.content or ""
                ones += "1" in answer
                asked = f"{turn}+1" if not clock else str(time.time_ns())
                said += [{"role": "assistant", "content": answer}, {"role": "user", "content": asked}]
        return ones / turns

    return talks


def tallying_agent(ran: list[int]) -> agl.LitAgent[Any]:
    """Its tool gives another result each time, which the next question has in it."""

    @agl.replayed
    def tally() -> int:
        ran.append(len(ran))
        return len(ran)

    @agl.rollout
    async def tallies(task: dict[str, Any], llm: agl.LLM) -> float:
        said, number = [{"role": "user", "content": task["question"]}], 0
        async with AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key) as client:
            for _ in range(3):
                messages: Any = said
                done = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
                answer, number = done.choices[0].message.content or "", tally()
                said += [{"role": "assistant", "content": answer}, {"role": "user", "content": f"{number}+1"}]
        return float(number % 2)

    return tallies


TASKS = [{"question": f"2+{n}"} for n in range(2)]


def trained(folder: Path, agent: agl.LitAgent[Any], **settings: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {"steps": 2, "tasks_per_step": 2, "group_size": 3, "advantage": "rloo", "branch_share": 0.8}
    given |= {"credit": "branches", "val_every": 0, "backend": "inprocess", **settings}
    algorithm = agl.GRPO(model="calc", **given)
    agl.Trainer(algorithm=algorithm, run_dir=folder, concurrency=8, console=SilentConsole()).fit(agent, TASKS)
    return [row for row in read_metrics(folder / "metrics.jsonl") if row.get("step")]


@pytest.mark.slow
async def test_continuations_say_what_states_are_worth(tmp_path: Path) -> None:
    rows = await asyncio.to_thread(trained, tmp_path / "run", agent_of(3), steps=1, tasks_per_step=1, branches=2)
    assert all(row["branches/states"] > 0 and row["branches/lost"] == 0 for row in rows)
    assert all(row["branches/forks"] == 2 * row["branches/states"] for row in rows)
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    rollouts = await store.query_rollouts(limit=-1)
    forks = [r for r in rollouts if FORK_OF in r.metadata]
    originals = {r.rollout_id: r for r in rollouts if FORK_OF not in r.metadata}
    assert len(originals) == 3
    calls = await store.query_calls([r.rollout_id for r in rollouts])
    for fork in forks:
        original = originals[fork.metadata[FORK_OF]]
        at = fork.metadata["at"]
        assert fork.input == original.input
        pairs = zip(calls[fork.rollout_id][:at], calls[original.rollout_id][:at], strict=True)
        assert all(np.array_equal(a.response_ids, b.response_ids) and not a.info.trained for a, b in pairs)
        assert all(call.info.trained for call in calls[fork.rollout_id][at:])
    for fork in forks:
        given = await store.get_resources_by_id(fork.resources_id or "")
        recording = given and recording_in(given.resources)
        assert recording, "its calls are in the store once, not in the recording of each state"
        assert (len(recording.call_ids), recording.calls) == (fork.metadata["at"], [])
    for original in originals.values():
        values = known_states(original)["values"]
        mine = [f for f in forks if f.metadata[FORK_OF] == original.rollout_id]
        assert set(values) == {calls[original.rollout_id][f.metadata["at"]].info.call_id for f in mine}
        assert len(values) <= 2
    assert sum(row["branches/tokens"] for row in rows) == sum(
        len(call.response_ids) for f in forks for call in calls[f.rollout_id][f.metadata["at"] :]
    )
    shown: dict[str, float] = {}
    for original in originals.values():
        for call_id, worth in (await advantages_of(store, original)).by_call.items():
            shown.setdefault(call_id, worth[0])
    episodes = await collect(store, list(originals))
    batches = credit(episodes, replace(RLOO, keep_flat=True), values=state_values(episodes))
    assert shown == {c.call.info.call_id: pytest.approx(c.advantages[0]) for batch in batches for c in batch}
    await store.close()


@pytest.mark.slow  # tests/emitter has the decorator, and test_continuations_say_what_states_are_worth a whole run
async def test_continuations_have_the_results_of_the_tools(tmp_path: Path) -> None:
    ran: list[int] = []
    given: dict[str, Any] = {"steps": 1, "tasks_per_step": 1, "branches": 2}
    (row,) = await asyncio.to_thread(trained, tmp_path / "run", tallying_agent(ran), **given)
    assert row["branches/states"] > 0
    assert row["branches/lost"] == 0, "they are in the state that they go on from"
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    rollouts = await store.query_rollouts(limit=-1)
    await store.close()
    assert len(ran) == sum(3 - r.metadata.get("at", 0) for r in rollouts), "what was before it did not run again"


@pytest.mark.slow
async def test_continuations_of_steps_that_are_sampled_ahead_are_learned_with_them(tmp_path: Path) -> None:
    given: dict[str, Any] = {"steps": 4, "max_staleness": 2, "branches": 2}
    rows = await asyncio.to_thread(trained, tmp_path / "run", agent_of(2), **given)
    store = SqliteLightningStore(tmp_path / "run" / "store.db")
    rollouts = await store.query_rollouts(limit=-1)
    for step, row in enumerate(rows, 1):
        known = [known_states(r) for r in rollouts if r.metadata["step"] == step and FORK_OF not in r.metadata]
        forks = {r.rollout_id for r in rollouts if r.metadata["step"] == step and FORK_OF in r.metadata}
        assert row["branches/forks"] == len(forks) > 0
        assert forks == {name for about in known for name in about["trained"]}, "each is learned with its rollout"
    await store.close()


@pytest.mark.slow
def test_agents_that_ask_something_else_each_time_lose_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = trained(tmp_path / "run", agent_of(3, clock=True))
    assert sum(row["branches/states"] for row in rows) > 0, "the state before the second call needs no second question"
    assert sum(row["branches/lost"] for row in rows) > 0


@pytest.mark.slow
def test_a_deterministic_run_is_the_same_again(tmp_path: Path) -> None:
    first, second = (
        trained(tmp_path / name, agent_of(2), deterministic=True, branches=3, branch_turns=1) for name in ("a", "b")
    )
    for name in ("branches/states", "branches/tokens", "reward", "grad_norm"):
        assert [row[name] for row in first] == [row[name] for row in second]


def test_what_is_known_belongs_to_one_rollout() -> None:
    """A sibling that is enqueued later has the metadata of the first one."""
    about = {"of": "r1", "values": {"c": 0.5}, "forks": 2, "lost": 0, "tokens": 3}
    for name, expected in (("r1", about), ("r2", {})):
        made = Rollout(rollout_id=name, input=None, start_time=0.0, metadata={STATES: about})
        assert known_states(made) == expected


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("GRPO", {"advantage": "reinforce"}, "take 'rloo'"),
        ("GRPO", {"advantage": "reinforce++baseline"}, "take 'rloo'"),
        ("GRPO", {"group_judge": {"model": "m", "base_url": "http://127.0.0.1:1/v1"}}, "group_judge"),
        ("GRPO", {"constraint": {"part": "cost", "at_most": 1.0}, "reward_weights": {"a": 1.0}}, "constraint"),
        ("GRPO", {"policies": ("a", "b"), "lora_rank": 4}, "several policies"),
        ("GRPO", {"kl_coef": 0.1, "kl_in": "reward"}, "kl_in='reward'"),
        ("GRPO", {"overlong_tokens": 40}, "overlong_tokens"),
        ("RLOO", {"reward_scale": "source"}, "reward_scale"),
        ("GRPO", {"gamma": 0.9}, "gamma=0.9 has no effect"),
        ("SFT", {}, "branches"),
    ],
)
def test_what_does_not_go_together_is_refused(kind: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        getattr(agl, kind)(model="calc", credit="branches", **settings)


@pytest.mark.parametrize("setting", ["branches", "branch_share", "branch_turns"])
def test_its_settings_need_it(setting: str) -> None:
    given: dict[str, Any] = {setting: 1}
    with pytest.raises(ConfigError, match="credit='branches'"):
        agl.GRPO(model="calc", **given)
