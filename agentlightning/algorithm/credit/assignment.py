"""Credit assignment: what each sampled token of a step's episodes is worth. Pure.

Units are made (`units`), a way of credit says what their calls are worth (`modes`), and the weights say how much each
token counts in the loss (`weights`).

In a run of several policies a rollout is seen through the eyes of each policy (`seen_by`); everything else is done for
each of them as for one that is alone.

With a decoupled advantage (GDPO) each named part of a reward is compared by itself (Liu et al., arXiv 2601.05242).

    A_k = (r_k − mean) / std of the part k among siblings,   A = Σ w_k A_k,   advantage = A / std of A over the step

With a weighted sum a part of small spread is drowned by one of large spread, and rollouts that are good in different
parts look alike. Here every part has the influence that its weight in `reward_weights` says. What was given without
a weighted part (a plain number, a penalty for length) is one more part, of weight 1. A part that a rollout lacks counts
as 0, as in the weighted sum. The mean of A over the step is 0 already, so groups that teach nothing stay at 0.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from agentlightning.algorithm.credit.advantage import STD_FLOOR, drgrpo, reinforce_pp, whiten
from agentlightning.algorithm.credit.modes import CREDIT_MODES, Assigned, Values, Worth
from agentlightning.algorithm.credit.ratios import entry_weights, filter_weights
from agentlightning.algorithm.credit.units import CreditRule, Unit, group_numbers, make_units, numbers
from agentlightning.algorithm.episode import Episode
from agentlightning.errors import ConfigError
from agentlightning.learner.packing import CreditedCall, is_kept
from agentlightning.types import Call
from agentlightning.types.arrays import Float32Array, Int32Array, np


def credit(
    episodes: Sequence[Episode],
    rule: CreditRule,
    *,
    minibatches: int = 1,
    values: Values | None = None,
    bonuses: Mapping[str, float] | None = None,
    keep_empty: bool = False,
) -> list[list[CreditedCall]]:
    """Advantages and weights of all calls that are trained, in minibatches of whole groups.

    `values` is what a critic expects before each sampled token, `bonuses` what to add to a call's reward, both by call
    id. A masked rollout changes nothing about its siblings. Rollouts whose advantage is 0 have no gradient and are
    dropped, but keep their share in the normalisation. Minibatches with nothing to learn are left out, unless
    `keep_empty`. Tokens that were drawn under a filter weigh as much less as the filter made them likelier, unless they
    are learned as they are, or their log-probs are over what the filter kept.
    """
    units = make_units(episodes, rule, bonuses or {})
    assigned, estimator = _worth(units, episodes, rule, values or {}, bonuses or {}), rule.estimator
    if estimator.selects and not rule.keep_flat:
        units = [u if _any(a) else replace(u, counts=False) for u, a in zip(units, assigned.advantages, strict=True)]
    groups_R = group_numbers(episodes)
    conversations, tokens_Q, rollout_Q = _conversations(units)
    counts_R = np.zeros(len(episodes), dtype=bool)
    for unit in units:
        counts_R[unit.rollout] |= unit.counts
    worths = assigned.advantages
    useful = {u.rollout for u, a in zip(units, worths, strict=True) if u.counts and (rule.keep_flat or _any(a))}
    weigh = _as_they_are if estimator.selects else as_drawn
    # Agents that are rewarded apart have pairs of their own.
    numbers_U = numbers([u.group if estimator.pairs else u.group[0] for u in units])
    batches: list[list[CreditedCall]] = []
    for groups in np.array_split(np.unique(groups_R), minibatches):
        taken_R = counts_R & np.isin(groups_R, groups)
        weights_Q = _weights(tokens_Q, rollout_Q, taken_R, rule)
        batches.append(
            [
                _credited(call, conversation, group, a, weigh(call, weights_Q[conversation]), g)
                for u, unit_a, unit_g, unit_c, group in zip(
                    units, worths, assigned.returns, conversations, numbers_U.tolist(), strict=True
                )
                if u.counts and u.rollout in useful and taken_R[u.rollout]
                for call, a, g, conversation in zip(u.calls, unit_a, unit_g, unit_c, strict=True)
            ]
        )
    return [batch for batch in batches if batch or keep_empty]


def refuse_rewards_below_zero(rule: CreditRule, episodes: Sequence[Episode]) -> None:
    """Raises ConfigError where the advantage divides by the mean of the rewards, and one of them is negative."""
    if not rule.estimator.from_zero or not CREDIT_MODES[rule.mode].compares:
        return
    lowest = min((r for e in episodes for r in (e.reward or 0.0, *(x.value for x in e.rewards))), default=0.0)
    if lowest < 0:
        raise ConfigError(
            f"advantage={rule.advantage!r} is for rewards of at least 0, best 0 and 1, and a rollout earned "
            f"{lowest:g}. Let the agent give rewards from 0 on, or take another advantage, such as 'grpo'."
        )


def groups_that_differ(episodes: Sequence[Episode], rule: CreditRule) -> set[Hashable]:
    """The groups, by their name in the metadata, whose siblings earned differently, as `rule` hands rewards out.

    A rule that compares no siblings compares the whole step: then these are the groups off its mean. Where parts of a
    reward are compared by themselves, siblings differ if they differ in one of them.
    """
    compares = CREDIT_MODES[rule.mode].compares
    alone = not compares or not rule.estimator.siblings
    plain = replace(rule, mode=rule.mode if compares else "return_to_go", advantage=reinforce_pp if alone else drgrpo)
    names = [episode.rollout.group for episode in episodes]
    differing: set[Hashable] = set()
    for seen in looked_at(episodes, rule):
        units = make_units(seen.episodes, seen.rule, {})
        found = _assign(units, plain, {}).advantages
        differing |= {names[u.rollout] for u, worths in zip(units, found, strict=True) if u.counts and _any(worths)}
    return differing


def explained_variance(batches: Sequence[Sequence[CreditedCall]], values: Values) -> float:
    """1 − Var(R − V) / Var(R) of a critic's predictions against its targets, before it learned from them.

    1 is all of it, 0 no better than one number for all; 0 also where all targets are equal.
    """
    calls = [c for batch in batches for c in batch if c.returns is not None]
    if not calls:
        return 0.0
    returns_E = np.concatenate([c.returns for c in calls if c.returns is not None])
    values_E = np.concatenate([values.get(c.call.info.call_id, np.zeros_like(c.returns)) for c in calls])
    valued_E = np.isfinite(returns_E)
    spread = float(np.var(returns_E[valued_E])) if valued_E.any() else 0.0
    return 1.0 - float(np.var((returns_E - values_E)[valued_E])) / spread if spread > 1e-8 else 0.0


def _worth(
    units: Sequence[Unit], episodes: Sequence[Episode], rule: CreditRule, values: Values, bonuses: Mapping[str, float]
) -> Assigned:
    """What calls are worth; with a decoupled advantage by each part of the rewards, added up."""
    assigned = _assign(units, rule, values)
    if not rule.estimator.decoupled or not CREDIT_MODES[rule.mode].compares:
        return assigned
    found = [
        (s.weight, _assign(make_units(s.episodes, s.rule, {} if s.part else bonuses), s.rule, values).advantages)
        for s in by_part(episodes, rule)
    ]
    return replace(assigned, advantages=added(found, [u.counts for u in units]))


def _assign(units: Sequence[Unit], rule: CreditRule, values: Values) -> Assigned:
    counts_U = np.array([u.counts for u in units], dtype=bool)
    if rule.estimator.pairs:  # half a pair teaches nothing
        counts_U &= np.array([bool(u.calls) for u in units], dtype=bool)
    mode = CREDIT_MODES[rule.mode]
    assigned = mode.assign(units, rule, counts_U, values)
    if not mode.compares or not rule.estimator.whitens:
        return assigned
    return replace(assigned, advantages=_whitened(units, assigned.advantages, counts_U))


def _whitened(units: Sequence[Unit], advantages: Sequence[Sequence[Worth]], counts_U: np.ndarray) -> list[list[Worth]]:
    """Mean 0 and std 1 over all sampled tokens of units that count, so a long response counts for as much as it is."""
    tokens = [
        [np.full(len(c.response_ids), a) for c, a in zip(u.calls, of, strict=False)]
        for u, of in zip(units, advantages, strict=True)
    ]
    found = whiten([[float(v) for a in of for v in a] for of in tokens], counts_U)
    ends = [np.cumsum([len(a) for a in of]) for of in tokens]
    return [list(np.split(np.array(v, np.float32), e[:-1])) if len(e) else [] for v, e in zip(found, ends, strict=True)]


def _any(advantages: Sequence[Worth]) -> bool:
    return any(np.any(a) for a in advantages)


def _conversations(units: Sequence[Unit]) -> tuple[list[list[int]], Int32Array, Int32Array]:
    """Number the conversations: a call belongs to that of the call it continues, unless another continued it before.

    Returns the number of each unit's calls, and each conversation's tokens and rollout.
    """
    found: list[list[int]] = []
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
        found.append(mine)
    return found, np.array(tokens, dtype=np.int32), np.array(rollouts, dtype=np.int32)


def _weights(tokens_Q: Int32Array, rollout_Q: Int32Array, taken_R: np.ndarray, rule: CreditRule) -> Float32Array:
    """Weight of each token by conversation."""
    if rule.normalization == "sequence":
        return entry_weights(tokens_Q, taken_R[rollout_Q] if len(rollout_Q) else taken_R[:0], "rollout")
    tokens_R = np.bincount(rollout_Q, weights=tokens_Q, minlength=len(taken_R)).astype(np.int32)
    weights_R = entry_weights(tokens_R, taken_R, rule.normalization, rule.constant)
    return weights_R[rollout_Q] if len(rollout_Q) else np.zeros(0, dtype=np.float32)


def _as_they_are(call: Call, weight: float) -> Float32Array:
    return np.full(len(call.response_ids), weight, dtype=np.float32)


def as_drawn(call: Call, weight: float) -> Float32Array:
    """The weights of a call's tokens: `weight`, or less where a filter made a token likelier than the policy does."""
    return _as_they_are(call, weight) * _unfiltered(call)


def plain_weight(credited: CreditedCall) -> float:
    """The weight that a call's tokens have where nothing was filtered: the inverse of `as_drawn`."""
    likeliest = int(np.argmax(shares := _unfiltered(credited.call)))
    return float(credited.weights[likeliest] / max(shares[likeliest], np.finfo(np.float32).tiny))


def _unfiltered(call: Call) -> Float32Array:
    filtered = filter_weights(call.plain_logprobs, call.logprobs)
    return np.where(is_kept(call), 1.0, filtered).astype(np.float32)


def _credited(
    call: Call, sequence: int, group: int, advantage: Worth, weights: Float32Array, returned: Worth | None
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


def seen_by(policy: str, episode: Episode) -> Episode:
    """The rollout as one policy learns from it: the calls of others are not trained, the rewards of others not its own.

    A reward is the policy's if it names nobody, the policy, or the agent that made one of its calls. A call whose agent
    has no name counts as made by an agent of the policy's name.
    """
    by_name = any(reward.agent == policy for reward in episode.rewards)
    calls = [_seen(call, policy, by_name) for call in episode.calls]
    agents = {call.info.agent for call in calls if call.info.policy == policy}
    return replace(episode, calls=calls, reward=episode.reward if episode.separate else episode.earned_by(*agents))


def _seen(call: Call, policy: str, by_name: bool) -> Call:
    info = call.info
    if info.policy != policy:
        return replace(call, info=replace(info, trained=False))
    return replace(call, info=replace(info, agent=policy if by_name else info.agent or policy))


def groups_to_learn_from(episodes: Sequence[Episode], rule: CreditRule, policies: Collection[str]) -> set[Hashable]:
    """The groups that teach anything: their siblings differ to one of the policies (to the one there is, if none)."""
    if not policies:
        return groups_that_differ(episodes, rule)
    return set().union(*(groups_that_differ([seen_by(p, e) for e in episodes], rule) for p in policies))


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """Rollouts as if one part of their rewards were all of it."""

    episodes: Sequence[Episode]
    rule: CreditRule
    part: str | None = None
    """None: the whole reward, or what was given without a weighted part."""
    weight: float = 1.0


def by_part(episodes: Sequence[Episode], rule: CreditRule) -> list[Seen]:
    """The rollouts by each part that has a weight, and by what was given without one."""
    rest = Seen([_rest(e, {*rule.weights, *rule.constrained}) for e in episodes], rule)
    return [rest, *(_of_one_part(episodes, rule, name, weight) for name, weight in rule.weights.items() if weight)]


def looked_at(episodes: Sequence[Episode], rule: CreditRule) -> list[Seen]:
    """In what siblings may differ: what they earned, or with a decoupled advantage any of its parts; and whatever has a
    constraint."""
    earned = by_part(episodes, rule) if rule.estimator.decoupled else [Seen(episodes, rule)]
    return [*earned, *(_of_one_part(episodes, rule, name) for name in rule.constrained)]


def _of_one_part(episodes: Sequence[Episode], rule: CreditRule, part: str, weight: float = 1.0) -> Seen:
    return Seen([of_part(e, part) for e in episodes], replace(rule, overlong=None), part, weight)


def of_part(episode: Episode, name: str) -> Episode:
    """The rollout as if this part were all that it earned."""
    if not episode.rewards:
        return replace(episode, reward=None if episode.reward is None else 0.0)
    return episode.with_rewards([replace(r, value=r.parts.get(name, 0.0)) for r in episode.rewards])


def _rest(episode: Episode, named: Set[str]) -> Episode:
    rewards = [replace(r, value=0.0) if named & r.parts.keys() else r for r in episode.rewards]
    return episode.with_rewards(rewards) if rewards else episode


def added(found: Sequence[tuple[float, Sequence[Sequence[Worth]]]], counts: Sequence[bool]) -> list[list[Worth]]:
    """The advantages by part, each with its weight, added up and divided by their deviation over the units that count;
    each unit weighs the same, however many calls it has."""
    sums = [np.zeros(len(turns)) for turns in found[0][1]]
    for weight, advantages in found:
        sums = [s + weight * np.array(turns, np.float64) for s, turns in zip(sums, advantages, strict=True)]
    squares = [float(np.mean(s**2)) for s, counted in zip(sums, counts, strict=True) if counted and len(s)]
    deviation = float(np.sqrt(np.mean(squares))) if squares else 0.0
    scale = 1.0 / deviation if deviation > STD_FLOOR else 0.0
    return [[*(s * scale).tolist()] for s in sums]
