"""Credit assignment: equal cases are equal bit for bit, masked siblings change nothing, rewards reach their calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

import agentlightning as agl
from agentlightning.algorithm.credit.advantage import ADVANTAGES, estimator
from agentlightning.algorithm.credit.assignment import credit, groups_that_differ
from agentlightning.algorithm.credit.modes import CREDIT_MODES
from agentlightning.algorithm.credit.units import OUTCOME_USE, CreditRule
from agentlightning.algorithm.episode import Earned, Episode, make_episode
from agentlightning.errors import ConfigError
from agentlightning.types import Attempt, Call, CallInfo, Outcome, Rollout, Span
from agentlightning.types.names import REWARD, REWARD_AGENT, REWARD_RESPONSE
from agentlightning.types.reward import reward_attributes

MODES = list(CREDIT_MODES)


def make_call(number: int, tokens: int, prompt: tuple[int, ...], agent: str | None, parent: str | None, r: str) -> Call:
    info = CallInfo(
        call_id=f"{r}-{number}",
        response_id=f"resp-{number}",
        rollout_id=r,
        attempt_id="a",
        choice=0,
        policy="p",
        trained=True,
        agent=agent,
        parent_call_id=parent,
        model="p",
        dialect="chat",
        finish_reason="stop",
        start_time=float(number),
        end_time=number + 0.5,
        temperature=1.0,
    )
    zeros = np.zeros(tokens, np.float32)
    return Call(info, np.array(prompt, np.int32), np.ones(tokens, np.int32), zeros, zeros, ())


def episode(
    group: str,
    rewards: list[tuple[float, int]],
    *,
    tokens: tuple[int, ...] = (2, 3),
    prompts: tuple[tuple[int, ...], ...] | None = None,
    agents: tuple[str | None, ...] | None = None,
    outcome: Outcome = Outcome.OK,
    name: str = "r",
) -> Episode:
    """A rollout whose calls sampled so many tokens; each reward is for the call with that index."""
    calls = []
    for i, n in enumerate(tokens):
        prompt = prompts[i] if prompts else tuple(range(i + 1))
        agent = agents[i] if agents else None
        calls.append(make_call(i, n, prompt, agent, f"{name}-{i - 1}" if i else None, name))
    attempt = Attempt(rollout_id=name, attempt_id="a", sequence_id=1, start_time=0.0, outcome=outcome)
    rollout = Rollout(rollout_id=name, input=1, start_time=0.0, metadata={"group": group})
    earned = [Earned(value, i) for value, i in rewards]
    return Episode(rollout, attempt, rewards[-1][0] if rewards else None, calls, earned)


def advantages(episodes: list[Episode], rule: CreditRule, **given: Any) -> list[list[float]]:
    """Of the first token of each call, by rollout."""
    named = [replace_name(e, f"r{i}") for i, e in enumerate(episodes)]
    found: dict[str, float] = {}
    for batch in credit(named, replace(rule, keep_flat=True), **given):
        for c in batch:
            assert len(set(c.advantages.tolist())) == 1
            found[c.call.info.call_id] = float(c.advantages[0])
    return [[found[c.info.call_id] for c in e.calls if c.info.call_id in found] for e in named]


def replace_name(e: Episode, name: str) -> Episode:
    calls = [replace(c, info=replace(c.info, call_id=f"{name}-{i}")) for i, c in enumerate(e.calls)]
    return replace(e, calls=calls)


rewards = st.floats(-5, 5, allow_nan=False, width=32)
lengths = st.lists(st.integers(1, 4), min_size=1, max_size=4).map(tuple)
members = st.lists(st.tuples(st.sampled_from(["g", "h"]), rewards, lengths), min_size=2, max_size=7)


@given(members, st.sampled_from(sorted(ADVANTAGES)))
def test_a_terminal_reward_with_gamma_1_is_broadcast_bit_for_bit(
    given_members: list[tuple[str, float, tuple[int, ...]]], advantage: str
) -> None:
    episodes = [episode(g, [(r, len(n) - 1)], tokens=n) for g, r, n in given_members]
    plain = credit(episodes, CreditRule(advantage=advantage))
    to_go = credit(episodes, CreditRule(advantage=advantage, mode="return_to_go"))
    assert [[(c.advantages.tobytes(), c.weights.tobytes()) for c in b] for b in plain] == [
        [(c.advantages.tobytes(), c.weights.tobytes()) for c in b] for b in to_go
    ]


failures = st.sampled_from([o for o in Outcome if OUTCOME_USE[o] == "mask"])


@given(
    st.lists(st.tuples(st.sampled_from(["g", "h"]), rewards, lengths, st.booleans()), min_size=2, max_size=7),
    failures,
    rewards,
    st.sampled_from(MODES),
    st.sampled_from(sorted(ADVANTAGES)),
    st.sampled_from(["token", "sequence", "rollout"]),
)
def test_a_masked_sibling_changes_nothing_in_any_mode(
    given_members: list[Any], outcome: Outcome, other: float, mode: str, advantage: str, normalization: Any
) -> None:
    rule = CreditRule(mode=mode, advantage=advantage, normalization=normalization, gamma=0.9)
    with_failed = [
        episode(g, [(other, 0)], tokens=n, outcome=outcome)
        if failed
        else episode(g, [(r, 0), (r / 2, len(n) - 1)], tokens=n)
        for g, r, n, failed in given_members
    ]
    without = [e for e in with_failed if e.outcome is Outcome.OK]

    def values(episodes: list[Episode]) -> list[Any]:
        batches = credit(episodes, rule) if episodes else []
        return [(c.advantages.tolist(), c.weights.tolist()) for batch in batches for c in batch]

    assert values(with_failed) == values(without)


def test_return_to_go_gives_a_call_what_comes_after_it() -> None:
    rule = CreditRule(mode="return_to_go", advantage="reinforce", gamma=0.5)
    (first, second) = advantages(
        [episode("g", [(1.0, 0), (4.0, 2)], tokens=(1, 1, 1)), episode("g", [(2.0, 1)], tokens=(1, 1))], rule
    )
    assert first == [1.0 + 0.25 * 4, 2.0, 4.0]
    assert second == [1.0, 2.0]


def test_a_sibling_that_ended_early_stands_with_its_last_value() -> None:
    rule = CreditRule(mode="return_to_go", advantage="drgrpo")
    long = episode("g", [(1.0, 0), (3.0, 1)], tokens=(1, 1))  # to go: 4, 3
    short = episode("g", [(2.0, 0)], tokens=(1,))  # to go: 2
    assert advantages([long, short], rule) == [[1.0, 0.5], [-1.0]]


def test_per_turn_compares_calls_in_the_same_state() -> None:
    rule = CreditRule(mode="per_turn", advantage="drgrpo")
    same, other = (7, 8), (7, 9)
    a = episode("g", [(1.0, 1)], tokens=(1, 1), prompts=((7,), same))
    b = episode("g", [(0.0, 1)], tokens=(1, 1), prompts=((7,), same))
    c = episode("g", [(5.0, 1)], tokens=(1, 1), prompts=((7,), other))
    found = advantages([a, b, c], rule)
    assert [f[0] for f in found] == pytest.approx([-1.0, -2.0, 3.0])
    assert [f[1] for f in found] == pytest.approx([0.5, -0.5, 3.0]), "c is alone in its state: turn by turn"


def test_gae_credits_what_the_critic_did_not_expect() -> None:
    rule = CreditRule(mode="gae", gamma=1.0, lam=0.0)
    episodes = [episode("g", [(1.0, 1)], tokens=(1, 1)), episode("h", [(0.0, 1)], tokens=(1, 1))]
    expected = {f"r{n}-{t}": np.full(1, 0.5, np.float32) for n in range(2) for t in range(2)}
    found = advantages(episodes, rule, values=expected)
    raw = np.array([0.0, 0.5, 0.0, -0.5])
    assert np.concatenate(found) == pytest.approx((raw - raw.mean()) / raw.std())


def test_token_gae_is_gae_over_the_tokens_of_all_calls() -> None:
    """Against the definition: A_t = Σ (γλ)^l δ_{t+l}, δ_t = r_t + γ V_{t+1} − V_t (arXiv 1506.02438, eq. 16)."""
    rule = CreditRule(mode="token_gae", gamma=0.9, lam=0.8)
    episodes = [episode("g", [(0.5, 0), (1.0, 1)], tokens=(2, 3)), episode("h", [(0.0, 1)], tokens=(1, 2))]
    rng = np.random.default_rng(0)
    values = {
        f"r{n}-{t}": rng.normal(size=k).astype(np.float32)
        for n, ks in enumerate([(2, 3), (1, 2)])
        for t, k in enumerate(ks)
    }
    found: list[float] = []
    for n, rewards in enumerate([[0, 0.5, 0, 0, 1.0], [0, 0, 0]]):
        v = [*np.concatenate([values[f"r{n}-0"], values[f"r{n}-1"]]), 0.0]
        delta = [r + 0.9 * v[t + 1] - v[t] for t, r in enumerate(rewards)]
        found += [sum((0.9 * 0.8) ** k * d for k, d in enumerate(delta[t:])) for t in range(len(delta))]
    raw = np.array(found)
    (batch,) = credit(
        [
            replace(e, calls=[replace(c, info=replace(c.info, call_id=f"r{n}-{t}")) for t, c in enumerate(e.calls)])
            for n, e in enumerate(episodes)
        ],
        replace(rule, keep_flat=True),
        values=values,
    )
    assert np.concatenate([c.advantages for c in batch]) == pytest.approx((raw - raw.mean()) / raw.std(), abs=1e-5)
    returned = [c.returns for c in batch]
    assert all(r is not None and len(r) == len(c.advantages) for r, c in zip(returned, batch, strict=True))


def test_gigpo_adds_the_advantage_of_the_rollout_and_of_the_step() -> None:
    """By hand, r − mean in both parts: three rollouts, two of which were in the same second state."""
    rule = CreditRule(mode="gigpo", advantage="drgrpo", gamma=0.5)
    same, other = (7, 8), (7, 9)
    a = episode("g", [(1.0, 1)], tokens=(1, 1), prompts=((7,), same))
    b = episode("g", [(0.0, 1)], tokens=(1, 1), prompts=((7,), same))
    c = episode("g", [(2.0, 1)], tokens=(1, 1), prompts=((7,), other))
    found = advantages([a, b, c], rule)
    of_rollouts, of_first, of_second = [0.0, -1.0, 1.0], [0.0, -0.5, 0.5], [0.5, -0.5, 0.0]
    assert [f[0] for f in found] == pytest.approx(np.add(of_rollouts, of_first))
    assert [f[1] for f in found] == pytest.approx(np.add(of_rollouts, of_second))


def test_dynamic_sampling_filters_by_what_was_earned_not_by_length() -> None:
    """DAPO (arXiv 2503.14476, section 3.2) keeps groups that are neither all right nor all wrong."""
    right = [episode("g", [(1.0, 0)], tokens=(n,)) for n in (2, 30)]
    rule = agl.DAPO(model="calc", overlong_tokens=10, overlong_margin=4).credit_rule()
    assert groups_that_differ(right, rule) == {"g"}
    assert groups_that_differ(right, replace(rule, overlong=None)) == set()


def median(returns_U: np.ndarray, groups_U: np.ndarray, counts_U: np.ndarray) -> np.ndarray:
    """An advantage of one's own."""
    return returns_U - np.median(returns_U[counts_U])


def test_an_advantage_of_ones_own_is_a_function() -> None:
    algorithm = agl.GRPO(model="calc", advantage=median)
    episodes = [episode("g", [(r, 0)], tokens=(1,)) for r in (0.0, 1.0, 5.0)]
    assert advantages(episodes, algorithm.credit_rule()) == [[-1.0], [0.0], [4.0]]
    assert algorithm.compares_siblings
    alone = agl.GRPO(model="calc", group_size=1, advantage=estimator(siblings=False)(median))
    assert not alone.compares_siblings


def test_an_advantage_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"takes \(returns_U, groups_U, counts_U\)"):
        agl.GRPO(model="calc", advantage=lambda returns: returns)  # pyright: ignore[reportArgumentType, reportUnknownLambdaType]
    wrong = CreditRule(advantage=lambda r, g, c: r[:1])
    with pytest.raises(ConfigError, match="one finite number for each of 2 returns"):
        credit([episode("g", [(r, 0)]) for r in (0.0, 1.0)], wrong)


def test_agents_with_rewards_of_their_own_are_compared_with_themselves() -> None:
    rule = CreditRule(advantage="drgrpo")

    def game(white: float, black: float) -> Episode:
        e = episode("g", [], tokens=(1, 1), agents=("white", "black"))
        return replace(e, reward=0.0, rewards=[Earned(white, 0, "white"), Earned(black, 1, "black")])

    assert advantages([game(1.0, -1.0), game(-1.0, 1.0)], rule) == [[1.0, -1.0], [-1.0, 1.0]]
    assert advantages([game(1.0, 5.0), game(0.0, 5.0)], rule) == [[0.5, 0.0], [-0.5, 0.0]]


def test_broadcast_of_several_rewards_is_the_last_or_their_sum() -> None:
    episodes = [episode("g", [(1.0, 0), (2.0, 1)]), episode("g", [(4.0, 0), (0.0, 1)])]
    assert advantages(episodes, CreditRule(advantage="drgrpo")) == [[1.0, 1.0], [-1.0, -1.0]]
    assert advantages(episodes, CreditRule(advantage="drgrpo", total=True)) == [[-0.5, -0.5], [0.5, 0.5]]


def test_rewards_belong_to_the_call_before_or_the_one_they_name() -> None:
    calls = [make_call(i, 1, (1,), None, None, "r") for i in range(3)]  # they start at 0, 1 and 2 s

    def reward(value: float, time: float, **more: Any) -> Span:
        attributes = {**reward_attributes(value), **more}
        return Span.from_attributes(
            attributes=attributes, rollout_id="r", attempt_id="a", name=REWARD, start_time=time, end_time=time
        )

    spans = [
        reward(0.1, 0.7),
        reward(0.2, 9.0, **{REWARD_RESPONSE: "resp-1"}),
        reward(0.3, 9.0, **{REWARD_AGENT: "black"}),
        reward(0.4, -1.0),
    ]
    rollout = Rollout(rollout_id="r", input=1, start_time=0.0)
    found = make_episode(rollout, None, calls, spans)
    assert found.rewards == [Earned(0.1, 0), Earned(0.2, 1, named=True), Earned(0.3, 2, "black"), Earned(0.4, None)]
    assert found.reward == 0.4


def test_long_rollouts_are_punished_softly() -> None:
    rule = CreditRule(advantage="reinforce", overlong=(10, 4))
    episodes = [episode("g", [(1.0, 0)], tokens=(n,)) for n in (6, 8, 10, 30)]
    assert [a[0] for a in advantages(episodes, rule)] == pytest.approx([1.0, 0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("normalization", "weights"),
    [
        ("token", [1 / 9, 1 / 9, 1 / 9]),
        ("rollout", [1 / 8, 1 / 8, 1 / 10]),
        ("sequence", [1 / 6, 1 / 6, 1 / 15]),
        ("constant", [1 / 200, 1 / 200, 1 / 200]),
    ],
)
def test_weights_by_normalization(normalization: Any, weights: list[float]) -> None:
    """A rollout of two conversations of two tokens each, and one of one conversation of five."""
    a, b = episode("g", [(1.0, 0)], tokens=(2, 2)), episode("g", [(0.0, 0)], tokens=(5,))
    apart = [replace(c, info=replace(c.info, parent_call_id=None, call_id=f"x{i}")) for i, c in enumerate(a.calls)]
    rule = CreditRule(normalization=normalization, constant=100)
    (batch,) = credit([replace(a, calls=apart), b], rule)
    assert [float(c.weights[0]) for c in batch] == pytest.approx(weights)


def test_a_bonus_counts_as_reward_of_its_call() -> None:
    rule = CreditRule(mode="return_to_go", advantage="reinforce")
    assert advantages([episode("g", [(1.0, 1)])], rule, bonuses={"r0-0": -0.25}) == [[0.75, 1.0]]


def test_tokens_drawn_under_a_filter_weigh_by_how_likely_they_were_without_it() -> None:
    """A grammar forced the second token of the first rollout: to the policy it was one in a hundred."""
    first, second = episode("g", [(1.0, 0)], tokens=(2,)), episode("g", [(0.0, 0)], tokens=(2,))
    plain, drawn = np.log(np.array([0.5, 0.01], np.float32)), np.log(np.array([0.5, 1.0], np.float32))
    forced = [replace(first, calls=[replace(first.calls[0], plain_logprobs=plain, logprobs=drawn)]), second]

    def weights(episodes: list[Episode], rule: CreditRule) -> list[list[float]]:
        return [c.weights.tolist() for batch in credit(episodes, rule) for c in batch]

    assert weights(forced, CreditRule()) == [[0.25, pytest.approx(0.0025)], [0.25, 0.25]]
    assert weights([first, second], CreditRule()) == [[0.25, 0.25], [0.25, 0.25]]
    assert weights(forced, CreditRule(advantage="best")) == [[0.5, 0.5]], "learned as it is"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "high", [1.0], None])
def test_a_reward_that_is_no_finite_number_is_none(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Spans come from any OpenTelemetry exporter; the emitters would have refused it."""
    one = episode("g", [])
    common: dict[str, Any] = {"rollout_id": "r", "attempt_id": "a", "trace_id": "t", "name": "reward"}
    good = Span(**common, sequence_id=1, span_id="1", start_time=9.0, attributes=reward_attributes(0.5))
    bad = Span(**common, sequence_id=2, span_id="2", start_time=9.5, attributes={f"{REWARD}.0.value": value})
    found = make_episode(one.rollout, one.attempt, one.calls, [good, bad])
    assert (found.reward, len(found.rewards)) == (0.5, 1)
    assert "is left out" in caplog.text


def team(group: str, outcome: float, helped: list[float], name: str) -> Episode:
    """A planner with two turns that asks a helper in between as often as there are numbers: what each call was given.

    Each helper's conversation has two turns as well; the reward names the first of them.
    """
    planner = [make_call(0, 1, (1,), "planner", None, name), make_call(99, 1, (1, 1), "planner", f"{name}-0", name)]
    helpers: list[Call] = []
    for n in range(len(helped)):
        first = make_call(10 * n + 1, 1, (2, n), "helper", f"{name}-0", name)
        helpers += [first, make_call(10 * n + 2, 1, (2, n, 1), "helper", first.info.call_id, name)]
    calls = [planner[0], *helpers, planner[1]]
    earned = [Earned(value, 1 + 2 * n, named=True) for n, value in enumerate(helped)]
    made = episode(group, [(outcome, 0)], tokens=(1,), name=name)
    return replace(made, calls=calls, rewards=[*earned, Earned(outcome, len(calls) - 1)], reward=outcome)


def test_invocations_of_an_agent_are_compared_with_their_like() -> None:
    """Against the formula by hand: planners by the outcome, helpers by the outcome and what they were given."""
    episodes = [team("g", 1.0, [0.5, 0.0], "a"), team("g", 0.0, [0.25], "b"), team("h", 5.0, [], "c")]
    found = {
        c.call.info.call_id: float(c.advantages[0])
        for batch in credit(episodes, CreditRule(mode="hierarchical", advantage="drgrpo", keep_flat=True))
        for c in batch
    }
    helpers = {"a-1": 1.0 + 0.5, "a-11": 1.0 + 0.0, "b-1": 0.0 + 0.25}
    mean = sum(helpers.values()) / 3
    for call, earned in helpers.items():
        both = [found[call], found[call[:-1] + "2"]]
        assert both == pytest.approx([earned - mean] * 2), "and all turns of an invocation alike"
    assert [found["a-0"], found["a-99"], found["b-0"], found["b-99"]] == pytest.approx([0.5, 0.5, -0.5, -0.5])
    assert found["c-0"] == 0.0, "another task"


@given(members, st.sampled_from(sorted(ADVANTAGES)))
def test_of_one_agent_with_one_conversation_hierarchical_is_broadcast(
    given_members: list[tuple[str, float, tuple[int, ...]]], advantage: str
) -> None:
    episodes = [
        replace_name(episode(g, [(r, len(n) - 1)], tokens=n, name=f"r{i}"), f"r{i}")
        for i, (g, r, n) in enumerate(given_members)
    ]
    plain = credit(episodes, CreditRule(advantage=advantage))
    by_agent = credit(episodes, CreditRule(advantage=advantage, mode="hierarchical"))
    assert [[c.advantages.tolist() for c in b] for b in by_agent] == [[c.advantages.tolist() for c in b] for b in plain]
