"""Which of a rollout's rewards count: whoever reads them says the same, whatever was given to whom in which order."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

import pytest

from agentlightning.algorithm.credit.assignment import seen_by
from agentlightning.algorithm.credit.units import CreditRule, Unit, make_units
from agentlightning.algorithm.episode import Episode, collect, reward_parts
from agentlightning.store import InMemoryLightningStore
from agentlightning.types import AttemptStatus, CallRecord, Outcome, Run
from agentlightning.types.names import REWARD, REWARD_AGENT, REWARD_RESPONSE
from agentlightning.types.reward import Callers, GivenReward, find_final_reward, reward_attributes, which_count
from tests.store.builders import make_call, make_segment, make_span

WEIGHTS = {"x": 0.5, "y": 0.25}


class Given(NamedTuple):
    agent: str | None
    named: bool


class Caller(NamedTuple):
    agent: str | None
    policy: str
    trained: bool


KINDS = [Given(agent, named) for agent in (None, "a", "b") for named in (False, True)]
ORDERS = [order for length in range(4) for order in product(KINDS, repeat=length)]
SHORT = [order for order in ORDERS if len(order) < 3]
CALLERS = {
    "both are trained": (Caller("a", "a", True), Caller("b", "b", True)),
    "one is frozen": (Caller("a", "a", True), Caller("b", "base", False)),
    "policies are named": (Caller(None, "a", True), Caller(None, "b", True)),
    "a frozen policy is named": (Caller(None, "a", True), Caller(None, "b", False)),
    "the frozen one has no name": (Caller("a", "a", True), Caller(None, "base", False)),
    "it never called": (Caller("a", "a", True), Caller("a", "a", True)),
}


def values(order: Sequence[Given]) -> list[float]:
    """Each mean of some of them is another number."""
    return [4.0 * 10**n for n in range(len(order))]


def named_call(given: Given) -> str | None:
    return f"call-{given.agent or 'a'}" if given.named else None


def attributes(given: Given, value: float) -> dict[str, Any]:
    """A reward whose parts add up to `value` by weight, and whose primary one is another number."""
    whose = {REWARD_AGENT: given.agent, REWARD_RESPONSE: named_call(given)}
    parts = reward_attributes({"y": 2 * value, "x": value, "z": -1.0}, primary_key="y")
    return {**parts, **{key: one for key, one in whose.items() if one is not None}}


async def recorded(
    store: InMemoryLightningStore,
    order: Sequence[Given],
    callers: Sequence[Caller],
    *,
    outcome: Outcome = Outcome.OK,
    late: bool = False,
) -> str:
    """A rollout of two calls and these rewards; `late`: the attempt had ended before they came, in reverse order."""
    claim = await store.start_rollout("task", worker_id="w", run_id="run", metadata={"group": "g"})
    calls: list[CallRecord] = []
    for number, caller in enumerate(callers):
        ids = [make_segment(f"p{number}", None, 0, [1]), make_segment(f"r{number}", f"p{number}", 1, [2], version=0)]
        made = make_call(claim, f"call-{'ab'[number]}", f"p{number}", f"r{number}", *ids)
        calls.append(replace(made, info=replace(made.info, **caller._asdict())))
    await store.add_calls(calls)
    spans = [make_span(claim, REWARD, **attributes(g, v)) for g, v in zip(order, values(order), strict=True)]
    spans = [span.model_copy(update={"sequence_id": 10 + number}) for number, span in enumerate(spans)]
    ended = claim.rollout_id, claim.attempt.attempt_id
    if not late:
        await store.add_many_spans(spans)
    await store.update_attempt(*ended, status=AttemptStatus.SUCCEEDED, outcome=outcome)
    for span in reversed(spans if late else []):
        await store.add_span(span)
    return claim.rollout_id


@pytest.fixture
async def store() -> AsyncIterator[InMemoryLightningStore]:
    store = InMemoryLightningStore()
    await store.begin_run(Run(run_id="run", algorithm="GRPO", agent="a", settings={"reward_weights": WEIGHTS}))
    yield store
    await store.close()


async def all_of(
    store: InMemoryLightningStore, callers: str, orders: Sequence[Sequence[Given]] = SHORT, **how: Any
) -> list[tuple[Sequence[Given], Episode, float | None]]:
    """The rollouts of these orders as an algorithm reads them, and what the store has noted of each."""
    ids = await asyncio.gather(*(recorded(store, order, CALLERS[callers], **how) for order in orders))
    noted = {one.rollout_id: one.reward for one in await store.list_rollouts(limit=-1)}
    return [(o, e, noted[e.rollout.rollout_id]) for o, e in zip(orders, await collect(store, ids), strict=True)]


def units_of(episode: Episode, **rule: Any) -> list[Unit]:
    """Those with something to train."""
    return [unit for unit in make_units([episode], CreditRule(**rule), {}) if unit.calls]


def worth(unit: Unit) -> float | None:
    return unit.total if unit.counts else None


def of_its_own(unit: Unit, order: Sequence[Given], otherwise: float | None) -> float | None:
    """What a call earned: the last reward that names it, or what its agent did."""
    (call,) = unit.calls
    named = [v for g, v in zip(order, values(order), strict=True) if named_call(g) == call.info.response_id]
    return named[-1] if named else otherwise


HOW: list[tuple[str, dict[str, Any]]] = [
    *((callers, how) for callers in CALLERS for how in ({}, {"late": True}, {"outcome": Outcome.TRUNCATED})),
    *((callers, {"orders": ORDERS}) for callers in ("both are trained", "one is frozen")),
]


@pytest.mark.parametrize(("callers", "how"), HOW)
async def test_all_readers_say_the_same(store: InMemoryLightningStore, callers: str, how: dict[str, Any]) -> None:
    for order, episode, noted in await all_of(store, callers, **how):
        nothing = 0.0 if episode.outcome is Outcome.TRUNCATED else None
        assert noted == episode.reward, order
        assert (episode.reward is None) == (not order and nothing is None)
        assert [r.value for r in episode.rewards] == pytest.approx(values(order)), "of the run's weights"
        assert reward_parts([episode]).get("x") == (episode.reward if order else None), order
        policies = sorted({c.policy for c in CALLERS[callers] if c.trained})
        seen = {policy: seen_by(policy, episode) for policy in policies}
        for one in seen.values():
            assert {worth(unit) for unit in units_of(one)} == {one.reward}, order
            for unit in units_of(one, by_call=True):
                assert worth(unit) == of_its_own(unit, order, one.reward), order
        if all(given.agent is None for given in order):
            assert {one.reward for one in seen.values()} == {episode.reward}
        own = {given.agent for given in order if not given.named} & set(policies)
        if own == set(policies) and Given(None, False) not in order:
            assert episode.reward == fmean(one.reward or 0.0 for one in seen.values()), order


@pytest.mark.parametrize("callers", CALLERS)
async def test_the_sum_is_of_all_that_reaches_an_agent(store: InMemoryLightningStore, callers: str) -> None:
    policies = {c.policy for c in CALLERS[callers] if c.trained}
    for (order, episode, _), policy in product(await all_of(store, callers), policies):
        mine = [v for given, v in zip(order, values(order), strict=True) if given.agent in (None, policy)]
        (unit,) = {worth(unit) for unit in units_of(seen_by(policy, episode), total=True)}
        assert unit == (sum(mine) if mine else None), order


A, B = "a", "b"
COMMON, OF_CALL = Given(None, False), Given(None, True)
KNOWN: list[tuple[str, list[Given], Callers, list[int], list[int]]] = [
    ("the last one", [COMMON, COMMON], Callers(), [1], [1]),
    ("not an intermediate one", [COMMON, OF_CALL], Callers(), [0], [0]),
    ("an intermediate one where nothing else is", [OF_CALL, OF_CALL], Callers(), [1], [1]),
    ("each agent's last", [Given(A, False), Given(B, False), Given(A, False)], Callers({A, B}), [2, 1], [2]),
    ("everybody's for the whole, one's own for an agent", [COMMON, Given(A, False)], Callers({A}), [0], [1]),
    ("everybody's for who has none", [Given(B, False), COMMON], Callers({A, B}), [1], [1]),
    ("agents' before intermediate ones for all", [Given(A, False), OF_CALL], Callers({A}), [0], [0]),
    ("an agent's not by its calls", [Given(A, False), Given(A, True)], Callers({A}), [0], [0]),
    ("not of who is not trained", [Given(A, False), Given(B, False)], Callers({A}, {B}), [0], [0]),
    ("of who is not trained where nothing else is", [Given(B, False)], Callers({A}, {B}), [0], []),
    ("nothing", [], Callers({A}), [], []),
]


@pytest.mark.parametrize(("rewards", "callers", "of_all", "of_a"), [k[1:] for k in KNOWN], ids=[k[0] for k in KNOWN])
def test_which_count(rewards: list[Given], callers: Callers, of_all: list[int], of_a: list[int]) -> None:
    given = [GivenReward(float(n), *one) for n, one in enumerate(rewards)]
    assert [r.value for r in which_count(given, callers=callers)] == of_all
    assert [r.value for r in which_count(given, agents=(A,))] == of_a


async def test_spans_alone_say_the_same_where_all_that_called_are_trained(store: InMemoryLightningStore) -> None:
    for order, episode, _ in await all_of(store, "both are trained"):
        spans = [span for span in await store.query_spans(episode.rollout.rollout_id) if span.name == REWARD]
        plain = [  # weights are a run's, and spans say nothing of them
            span.model_copy(update={"attributes": span.attributes | reward_attributes(v)})
            for span, v in zip(spans, values(order), strict=True)
        ]
        assert find_final_reward(plain) == episode.reward, order
