"""Ways of credit: which of a unit's calls, and which of their tokens, a reward goes to. Pure.

`broadcast`      a rollout's return goes to each of its calls
`return_to_go`   a call is worth the rewards from it on, discounted by γ per turn; siblings are compared turn by turn
`per_turn`       the same, but calls that siblings made in the very same state are compared with each other; where no
                 sibling was in a state, turn by turn
`gigpo`          the rollout's advantage plus that of the call among all calls made in the very same state (GiGPO, Feng
                 et al., arXiv 2505.10978, eq. 3, 7 and 8 with ω = 1)
`hierarchical`   each invocation of an agent is compared with all invocations of that agent in the group, by what its
                 rollout earned plus what its own calls were given (M-GRPO, Hong et al., arXiv 2511.13288)
`branches`       a call is worth the value of the next known state less that of the last one, the states' values being
                 the means of what continuations earned; the first state is known from siblings, the last is the return
`gae`            a critic says what a state is worth; generalised advantage estimation over turns
`token_gae`      the same over sampled tokens, as PPO does for language models; γ counts per token
`teacher`        a token is worth how much likelier a teacher finds it than the policy that sampled it: the reverse KL
                 per token (on-policy distillation, Agarwal et al., arXiv 2306.13649); rewards play no part

With a terminal reward only and γ = 1, `return_to_go` is `broadcast`, bit for bit. What a way needs it says itself; a
new one is a function and a line in `CREDIT_MODES`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from agentlightning.algorithm.credit.advantage import by_position, gae, return_to_go, whiten
from agentlightning.algorithm.credit.units import CreditRule, Unit, numbers
from agentlightning.types.arrays import Array, Float32Array, np
from agentlightning.types.call import Call

Worth = float | Float32Array
"""Of a call's tokens: one value for all of them, or one each."""


@dataclass(frozen=True, slots=True, eq=False)
class Assigned:
    """The advantages of the calls of each unit, by unit and turn."""

    advantages: Sequence[Sequence[Worth]]
    returns: Sequence[Sequence[Worth | None]]
    """What a critic should have predicted; None without one."""


Values = Mapping[str, Float32Array]
"""By call id: what the critic expects before each of its sampled tokens, or how much likelier the teacher finds it."""
Assign = Callable[[Sequence[Unit], CreditRule, Array, Values], Assigned]
"""(units, rule, counts_U, values) → what calls are worth. A masked unit gets 0 and changes nothing about others."""


@dataclass(frozen=True, slots=True)
class CreditMode:
    """A way of credit and what it needs."""

    assign: Assign
    turns: bool = True
    """It looks at when rewards came, so that a discount plays a part."""
    critic: bool = False
    """It compares with what a critic expects, not with siblings."""
    teacher: bool = False
    """It compares with what a teacher would have said, not with siblings, and needs no reward."""
    branches: bool = False
    """It compares with what continuations of a rollout earned, which go on from its states."""

    @property
    def divides(self) -> bool:
        """Whether calls or tokens of one rollout may be worth different things."""
        return self.turns or self.teacher or self.branches

    @property
    def compares(self) -> bool:
        """Whether returns are compared by an advantage."""
        return not self.critic and not self.teacher


def broadcast(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    """See the module's docstring, as for the others."""
    return _compared(units, rule, counts_U, [[u.total] * max(len(u.calls), 1) for u in units])


def returns_to_go(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    return _compared(units, rule, counts_U, _to_go(units, rule))


def per_turn(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    """Calls in states that at least two siblings were in are compared there. A state is the exact prompt."""
    to_go = _to_go(units, rule)
    advantages = [list(a) for a in _compared(units, rule, counts_U, to_go).advantages]
    visits: dict[tuple[int, Hashable], list[int]] = {}
    for n, t, state in _states(units):
        visits.setdefault((n, state), []).append(t)
    keys = list(visits)
    states_V = numbers([state for _, state in keys])
    counts_V = np.array([bool(counts_U[n]) for n, _ in keys], dtype=bool)
    visitors = np.bincount(states_V, weights=counts_V)
    found = by_position([[to_go[n][t] for t in visits[n, s]] for n, s in keys], states_V, counts_V, rule.estimator)
    for (n, state), number, compared in zip(keys, states_V, found, strict=True):
        if visitors[number] >= 2:
            for t, advantage in zip(visits[n, state], compared, strict=True):
                advantages[n][t] = advantage
    return Assigned(advantages, _no_returns(units))


def gigpo(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    """A(a) = A_episode + A_step; a state that only one call was made in has no step term."""
    advantages = [list(a) for a in broadcast(units, rule, counts_U, values).advantages]
    to_go, visits = _to_go(units, rule), list(_states(units))
    returns_V = np.array([to_go[n][t] for n, t, _ in visits], dtype=np.float32)
    counts_V = np.array([bool(counts_U[n]) for n, _, _ in visits], dtype=bool)
    steps_V = rule.estimator(returns_V, numbers([state for _, _, state in visits]), counts_V)
    for (n, t, _), step in zip(visits, steps_V.tolist(), strict=True):
        advantages[n][t] += step
    return Assigned(advantages, _no_returns(units))


def branches(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    """With A(x) the advantage of a unit if it had earned x, a call between two known states of the values V and V' gets
    A(V') − A(V): for `rloo` that is V' − V, and A(V) of the first state is 0. What a unit's calls get adds up to its
    own advantage. Where no state in the middle is known it is `broadcast`.
    """
    advantages = [list(a) for a in broadcast(units, rule, counts_U, values).advantages]
    for n, unit in enumerate(units):
        known = [(t, values[c.info.call_id]) for t, c in enumerate(unit.calls) if c.info.call_id in values]
        if not known or not counts_U[n]:
            continue
        worth = estimated(units, rule, counts_U, n)
        whole, start, before = advantages[n][0], 0, 0.0
        for t, value in known:
            at = worth(float(value[0]))
            advantages[n][start:t] = [at - before] * (t - start)
            start, before = t, at
        advantages[n][start:] = [whole - before] * (len(unit.calls) - start)
    return Assigned(advantages, _no_returns(units))


def estimated(units: Sequence[Unit], rule: CreditRule, counts_U: Array, n: int) -> Callable[[float], float]:
    """The advantage of the n-th unit as a function of what it would have earned, its siblings being as they are."""
    groups = [u.group for u in units]
    members = [m for m, group in enumerate(groups) if group == groups[n]]
    earned = np.array([units[m].total for m in members], np.float32)
    own, alone = np.equal(members, n), np.zeros(len(members), np.int32)

    def worth(value: float) -> float:
        return float(rule.estimator(np.where(own, np.float32(value), earned), alone, counts_U[members])[own][0])

    return worth


def hierarchical(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    """An invocation is a conversation of one agent. Those of an agent are pooled over the rollouts of the group.

    So a planner that answers once and helpers that it asks now and then are each compared with their like. The paper
    duplicates or drops invocations until each rollout has as many; here each of them counts once.
    """
    found = _invocations(units)
    earned_V = np.array([units[n].shared + sum(units[n].own_T[t] for t in turns) for n, turns in found], np.float32)
    agents_V = numbers([(units[n].group, units[n].calls[turns[0]].info.agent) for n, turns in found])
    counts_V = np.array([bool(counts_U[n]) for n, _ in found], dtype=bool)
    advantages: list[list[Worth]] = [[0.0] * len(u.calls) for u in units]
    for (n, turns), advantage in zip(found, rule.estimator(earned_V, agents_V, counts_V).tolist(), strict=True):
        for t in turns:
            advantages[n][t] = advantage
    return Assigned(advantages, _no_returns(units))


def _invocations(units: Sequence[Unit]) -> list[tuple[int, list[int]]]:
    """Unit and turns of each: a call belongs to that of the call it continues, if the same agent made both."""
    found: dict[tuple[int, str], list[int]] = {}
    for n, unit in enumerate(units):
        first: dict[tuple[str | None, str | None], str] = {}
        for t, call in enumerate(unit.calls):
            info = call.info
            begun = first[info.agent, info.call_id] = first.get((info.agent, info.parent_call_id), info.call_id)
            found.setdefault((n, begun), []).append(t)
    return [(n, turns) for (n, _), turns in found.items()]


def gae_over_turns(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    found = [gae(u.rewards_T, [float(v[0]) for v in _values_of(values, u)], rule.gamma, rule.lam) for u in units]
    returns = [list(map(_at_first, u.calls, of_unit)) for u, (_, of_unit) in zip(units, found, strict=True)]
    return Assigned(whiten([a for a, _ in found], counts_U), returns)


def gae_over_tokens(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    """A call's reward is earned by its last token; γ and λ count per token (Ouyang et al., arXiv 2203.02155)."""
    found: list[tuple[list[float], list[float]]] = []
    for u in units:
        rewards = [[0.0] * (len(c.response_ids) - 1) + [r] for c, r in zip(u.calls, u.rewards_T, strict=True)]
        expected = [v for call in _values_of(values, u) for v in call.tolist()]
        found.append(gae([r for call in rewards for r in call], expected, rule.gamma, rule.lam))
    advantages = whiten([a for a, _ in found], counts_U)
    return Assigned(
        [_by_call(u, a) for u, a in zip(units, advantages, strict=True)],
        [_by_call(u, g) for u, (_, g) in zip(units, found, strict=True)],
    )


def from_teacher(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Values) -> Assigned:
    """log π_teacher − log π of each token; with γ = 0 per token that is all that a token changes."""
    worths = [
        _values_of(values, u) if counts else [0.0] * len(u.calls) for u, counts in zip(units, counts_U, strict=True)
    ]
    return Assigned(worths, _no_returns(units))


CREDIT_MODES: dict[str, CreditMode] = {
    "broadcast": CreditMode(broadcast, turns=False),
    "return_to_go": CreditMode(returns_to_go),
    "per_turn": CreditMode(per_turn),
    "gigpo": CreditMode(gigpo),
    "hierarchical": CreditMode(hierarchical, turns=False),
    "branches": CreditMode(branches, turns=False, branches=True),
    "gae": CreditMode(gae_over_turns, critic=True),
    "token_gae": CreditMode(gae_over_tokens, critic=True),
    "teacher": CreditMode(from_teacher, turns=False, teacher=True),
}


def _compared(units: Sequence[Unit], rule: CreditRule, counts_U: Array, values: Sequence[Sequence[float]]) -> Assigned:
    found = by_position(values, numbers([u.group for u in units]), counts_U, rule.estimator)
    return Assigned([a[: len(u.calls)] for u, a in zip(units, found, strict=True)], _no_returns(units))


def _to_go(units: Sequence[Unit], rule: CreditRule) -> list[list[float]]:
    return [return_to_go(u.rewards_T, rule.gamma) or [u.total] for u in units]


def _states(units: Sequence[Unit]) -> list[tuple[int, int, Hashable]]:
    """Unit, turn and state of every call."""
    return [(n, t, (u.group, c.prompt_ids.tobytes())) for n, u in enumerate(units) for t, c in enumerate(u.calls)]


def _no_returns(units: Sequence[Unit]) -> list[list[None]]:
    return [[None] * len(u.calls) for u in units]


def _values_of(values: Values, unit: Unit) -> list[Float32Array]:
    """By turn: what is expected before each sampled token; 0 where nobody was asked."""
    zeros = [np.zeros(len(c.response_ids), dtype=np.float32) for c in unit.calls]
    return [values.get(c.info.call_id, zero) for c, zero in zip(unit.calls, zeros, strict=True)]


def _at_first(call: Call, value: float) -> Float32Array:
    """The critic is asked before a call, and at none of its later tokens."""
    found = np.full(len(call.response_ids), np.nan, dtype=np.float32)
    found[:1] = value
    return found


def _by_call(unit: Unit, values: Sequence[float]) -> list[Worth]:
    ends = np.cumsum([len(c.response_ids) for c in unit.calls])
    return list(np.split(np.array(values, dtype=np.float32), ends[:-1])) if len(ends) else []
