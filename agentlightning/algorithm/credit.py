"""Credit assignment: what each sampled token of a step's episodes is worth. Pure.

`broadcast`      a rollout's return goes to each of its calls
`return_to_go`   a call is worth the rewards from it on, discounted by γ per turn; siblings are compared turn by turn
`per_turn`       the same, but calls that siblings made in the very same state are compared with each other (as in
                 GiGPO, Feng et al., arXiv 2505.10978); where no sibling was in a state, turn by turn
`gae`            a critic says what a state is worth; generalised advantage estimation over turns

With a terminal reward only and γ = 1, `return_to_go` is `broadcast`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from agentlightning.algorithm.episode import Earned, Episode
from agentlightning.learner.advantage import (
    ADVANTAGES,
    ALONE,
    SELECTING,
    by_position,
    entry_weights,
    filter_weights,
    gae,
    overlong_penalty,
    return_to_go,
    whiten,
)
from agentlightning.learner.packing import CreditedCall
from agentlightning.types import Outcome
from agentlightning.types.call import Call, Float32Array, Int32Array

Use = Literal["train", "zero", "mask"]
Mode = Literal["broadcast", "return_to_go", "per_turn", "gae"]
Normalization = Literal["token", "sequence", "rollout", "constant"]

OUTCOME_USE: Mapping[Outcome, Use] = {
    Outcome.OK: "train",
    Outcome.TRUNCATED: "train",
    Outcome.AGENT_ERROR: "mask",
    Outcome.INFRA_ERROR: "mask",
    Outcome.JUDGE_ERROR: "mask",
    Outcome.TIMEOUT: "mask",
    Outcome.CANCELLED: "mask",
}
"""What a rollout that ended so is to the update: trained with its reward, trained with reward 0, or left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditRule:
    """How rewards become advantages and weights."""

    mode: Mode = "broadcast"
    advantage: str = "grpo"
    """A key of `learner.advantage.ADVANTAGES`; `gae` has its own."""
    gamma: float = 1.0
    lam: float = 1.0
    total: bool = False
    """Whether `broadcast` gives the sum of a rollout's rewards instead of the last one."""
    normalization: Normalization = "token"
    constant: float | None = None
    overlong: tuple[int, int] | None = None
    """Sampled tokens from which a rollout earns 1 less, and over how many tokens before it the penalty rises."""
    keep_flat: bool = False
    """Keep rollouts without advantage: they have no policy gradient, but count for KL, entropy and a critic."""
    uses: Mapping[Outcome, Use] = field(default_factory=lambda: OUTCOME_USE)


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """What is compared with its siblings: a rollout, or one agent's part in it. T calls that are trained."""

    rollout: int
    """Index of the episode."""
    group: tuple[Hashable, str | None]
    """Of siblings, and of which agent where agents are rewarded apart."""
    counts: bool
    """False: masked."""
    total: float
    """What it earned altogether, as `broadcast` sees it."""
    rewards_T: Sequence[float]
    calls: Sequence[Call]


def credit(
    episodes: Sequence[Episode],
    rule: CreditRule,
    *,
    minibatches: int = 1,
    values: Mapping[str, float] | None = None,
    bonuses: Mapping[str, float] | None = None,
) -> list[list[CreditedCall]]:
    """Advantages and weights of all calls that are trained, in minibatches of whole groups.

    `values` is what a critic expects before each call (for `gae`), `bonuses` what to add to a call's reward, both by
    call id. A masked rollout changes nothing about its siblings. Rollouts whose advantage is 0 have no gradient and are
    dropped, but keep their share in the normalisation. Minibatches with nothing to learn are left out. Tokens that were
    drawn under a filter weigh as much less as the filter made them likelier, unless they are learned as they are.
    """
    units = make_units(episodes, rule, bonuses or {})
    advantages, returns = _advantages(units, rule, values or {})
    if rule.advantage in SELECTING and not rule.keep_flat:
        units = [u if any(a) else replace(u, counts=False) for u, a in zip(units, advantages, strict=True)]
    groups_R = group_numbers(episodes)
    conversations, tokens_Q, rollout_Q = _conversations(units)
    counts_R = np.zeros(len(episodes), dtype=bool)
    for unit in units:
        counts_R[unit.rollout] |= unit.counts
    useful = {u.rollout for u, a in zip(units, advantages, strict=True) if u.counts and (rule.keep_flat or any(a))}
    weigh = _as_they_are if rule.advantage in ("all", *SELECTING) else _as_drawn
    paired = rule.advantage == "best_and_worst"  # and agents that are rewarded apart have pairs of their own
    numbers_U = _numbers([u.group if paired else u.group[0] for u in units])
    batches: list[list[CreditedCall]] = []
    for groups in np.array_split(np.unique(groups_R), minibatches):
        taken_R = counts_R & np.isin(groups_R, groups)
        weights_Q = _weights(tokens_Q, rollout_Q, taken_R, rule)
        batches.append(
            [
                _credited(call, conversation, group, a, weigh(call, weights_Q[conversation]), g)
                for u, unit_a, unit_g, unit_c, group in zip(
                    units, advantages, returns, conversations, numbers_U.tolist(), strict=True
                )
                if u.counts and u.rollout in useful and taken_R[u.rollout]
                for call, a, g, conversation in zip(u.calls, unit_a, unit_g, unit_c, strict=True)
            ]
        )
    return [batch for batch in batches if batch]


def groups_that_differ(episodes: Sequence[Episode], rule: CreditRule) -> set[Hashable]:
    """The groups, by their name in the metadata, whose siblings earned differently, as `rule` hands rewards out.

    A rule that compares no siblings compares the whole step: then these are the groups off its mean.
    """
    alone = rule.mode == "gae" or rule.advantage in ALONE
    mode: Mode = "return_to_go" if rule.mode == "gae" else rule.mode
    units = make_units(episodes, rule, {})
    found, _ = _advantages(units, replace(rule, mode=mode, advantage="reinforce++" if alone else "drgrpo"), {})
    return {u.group[0] for u, advantages in zip(units, found, strict=True) if u.counts and any(advantages)}


def make_units(episodes: Sequence[Episode], rule: CreditRule, bonuses: Mapping[str, float]) -> list[Unit]:
    """One unit per rollout; where agents have rewards of their own, one per agent; one per triplet an agent gave."""
    units: list[Unit] = []
    for r, e in enumerate(episodes):
        use = rule.uses[e.outcome]
        group = e.rollout.metadata.get("group")
        if e.separate:
            parts = [(_alone(e, i), [(i, c)]) for i, c in enumerate(e.calls) if c.info.trained and len(c.response_ids)]
            units += [_unit(r, part, use, (group, None), calls, rule, bonuses) for part, calls in parts]
            continue
        agents = {c.info.agent for c in e.calls} if any(x.agent for x in e.rewards) else {None}
        for agent in sorted(agents, key=str):
            calls = [(i, c) for i, c in enumerate(e.calls) if len(agents) == 1 or c.info.agent == agent]
            trained = [(i, c) for i, c in calls if c.info.trained and len(c.response_ids)]
            units.append(_unit(r, e, use, (group, agent), trained, rule, bonuses))
    return units


def _alone(episode: Episode, call: int) -> Episode:
    """The episode as if this call and its own reward were all of it."""
    return replace(episode, reward=None, rewards=[x for x in episode.rewards if x.call == call])


def _unit(
    r: int,
    episode: Episode,
    use: Use,
    key: tuple[Any, str | None],
    calls: Sequence[tuple[int, Call]],
    rule: CreditRule,
    bonuses: Mapping[str, float],
) -> Unit:
    agent = key[1]
    given = episode.rewards
    if not given and episode.reward is not None:
        given = [Earned(episode.reward, len(episode.calls) - 1)]
    earned = [x for x in given if x.agent is None or x.agent == agent] if use == "train" else []
    rewards_T = [bonuses.get(c.info.call_id, 0.0) for _, c in calls]
    for x in earned:
        before = [t for t, (i, _) in enumerate(calls) if x.call is not None and i <= x.call]
        if before:
            rewards_T[before[-1]] += x.value
    whole = [x for x in earned if not x.named] or earned  # the others are intermediate
    own = [x.value for x in whole if x.agent == agent] or [x.value for x in whole]
    final = (sum(x.value for x in earned) if rule.total else own[-1]) if own else None
    if final is None and episode.outcome is Outcome.TRUNCATED:
        final = 0.0  # it ran out of what it may use before it earned anything
    shaped = _overlong(calls, rule)
    if rewards_T:
        rewards_T[-1] += shaped
    return Unit(
        rollout=r,
        group=key,
        counts=use == "zero" or (use == "train" and final is not None),
        total=(final or 0.0) + sum(bonuses.get(c.info.call_id, 0.0) for _, c in calls) + shaped,
        rewards_T=rewards_T,
        calls=[c for _, c in calls],
    )


def _overlong(calls: Sequence[tuple[int, Call]], rule: CreditRule) -> float:
    if rule.overlong is None:
        return 0.0
    tokens = np.array([sum(len(c.response_ids) for _, c in calls)], dtype=np.int32)
    return float(overlong_penalty(tokens, *rule.overlong)[0])


def _advantages(
    units: Sequence[Unit], rule: CreditRule, expected: Mapping[str, float]
) -> tuple[list[list[float]], list[list[float] | list[None]]]:
    """Per unit and turn: the advantage, and what a critic should have predicted (None without one)."""
    counts_U = np.array([u.counts for u in units], dtype=bool)
    if rule.mode == "gae":
        estimates = [
            gae(u.rewards_T, [expected.get(c.info.call_id, 0.0) for c in u.calls], rule.gamma, rule.lam) for u in units
        ]
        return whiten([a for a, _ in estimates], counts_U), [g for _, g in estimates]
    estimator = ADVANTAGES[rule.advantage]
    if rule.advantage == "best_and_worst":  # half a pair teaches nothing
        counts_U &= np.array([bool(u.calls) for u in units], dtype=bool)
    groups_U = _numbers([u.group for u in units])
    if rule.mode == "broadcast":
        values = [[u.total] * max(len(u.calls), 1) for u in units]
    else:
        values = [return_to_go(u.rewards_T, rule.gamma) or [u.total] for u in units]
    found = by_position(values, groups_U, counts_U, estimator)
    advantages = [a[: len(u.calls)] for u, a in zip(units, found, strict=True)]
    if rule.mode == "per_turn":
        _compare_states(units, values, counts_U, estimator, advantages)
    return advantages, [[None] * len(u.calls) for u in units]


def _compare_states(
    units: Sequence[Unit],
    values: Sequence[Sequence[float]],
    counts_U: np.ndarray,
    estimator: Callable[[Float32Array, Int32Array, np.ndarray], Float32Array],
    advantages: list[list[float]],
) -> None:
    """Replace the advantages of calls in states that at least two siblings were in. A state is the exact prompt."""
    visits: dict[tuple[int, Hashable], list[int]] = {}
    for n, u in enumerate(units):
        for t, call in enumerate(u.calls):
            visits.setdefault((n, (u.group, call.prompt_ids.tobytes())), []).append(t)
    keys = list(visits)
    states_V = _numbers([state for _, state in keys])
    counts_V = np.array([bool(counts_U[n]) for n, _ in keys], dtype=bool)
    visitors = np.bincount(states_V, weights=counts_V)
    found = by_position([[values[n][t] for t in visits[n, s]] for n, s in keys], states_V, counts_V, estimator)
    for (n, state), number, compared in zip(keys, states_V, found, strict=True):
        if visitors[number] >= 2:
            for t, advantage in zip(visits[n, state], compared, strict=True):
                advantages[n][t] = advantage


def group_numbers(episodes: Sequence[Episode]) -> Int32Array:
    """The group of each rollout as a number; siblings carry the same `group` in their metadata."""
    return _numbers([e.rollout.metadata.get("group") for e in episodes])


def _numbers(keys: Sequence[Hashable]) -> Int32Array:
    numbers: dict[Hashable, int] = {}
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], dtype=np.int32)


def _conversations(units: Sequence[Unit]) -> tuple[list[list[int]], Int32Array, Int32Array]:
    """Number the conversations: a call belongs to that of the call it continues, unless another continued it before.

    Returns the number of each unit's calls, and each conversation's tokens and rollout.
    """
    numbers: list[list[int]] = []
    tokens: list[int] = []
    rollouts: list[int] = []
    for unit in units:
        ends: dict[str, int] = {}
        mine: list[int] = []
        for call in unit.calls:
            number = ends.pop(call.info.parent_call_id or "", len(tokens))
            if number == len(tokens):
                tokens.append(0)
                rollouts.append(unit.rollout)
            tokens[number] += len(call.response_ids) if unit.counts else 0
            ends[call.info.call_id] = number
            mine.append(number)
        numbers.append(mine)
    return numbers, np.array(tokens, dtype=np.int32), np.array(rollouts, dtype=np.int32)


def _weights(tokens_Q: Int32Array, rollout_Q: Int32Array, taken_R: np.ndarray, rule: CreditRule) -> Float32Array:
    """Weight of each token by conversation."""
    if rule.normalization == "sequence":
        return entry_weights(tokens_Q, taken_R[rollout_Q] if len(rollout_Q) else taken_R[:0], "rollout")
    tokens_R = np.bincount(rollout_Q, weights=tokens_Q, minlength=len(taken_R)).astype(np.int32)
    weights_R = entry_weights(tokens_R, taken_R, rule.normalization, rule.constant)
    return weights_R[rollout_Q] if len(rollout_Q) else np.zeros(0, dtype=np.float32)


def _as_they_are(call: Call, weight: float) -> Float32Array:
    return np.full(len(call.response_ids), weight, dtype=np.float32)


def _as_drawn(call: Call, weight: float) -> Float32Array:
    return _as_they_are(call, weight) * filter_weights(call.plain_logprobs, call.logprobs)


def _credited(
    call: Call, sequence: int, group: int, advantage: float, weights: Float32Array, returned: float | None
) -> CreditedCall:
    n = len(call.response_ids)
    return CreditedCall(
        call=call,
        sequence=sequence,
        group=group,
        advantages=np.full(n, advantage, dtype=np.float32),
        weights=weights,
        returns=None if returned is None else np.full(n, returned, dtype=np.float32),
    )
