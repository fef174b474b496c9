"""Credit of continuations: rollouts that go on from a state of another one are trained from there on. Pure.

The rollout's own calls from the state on and those of its m continuations are m + 1 draws of the same: what the policy
does in this state. Each counts 1 / (m + 1), so the state has the place in the gradient that it has without them, and
the estimate is nearer. In a rollout with several such states the shares multiply, as in any tree whose branches are
averaged. A continuation is compared with the mean of the others and the rollout it goes on from (leave one out, as in
RLOO), which do not depend on what it did.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from agentlightning.algorithm.credit.assignment import as_drawn, plain_weight
from agentlightning.algorithm.credit.modes import estimated
from agentlightning.algorithm.credit.units import CreditRule, Unit, make_units
from agentlightning.algorithm.episode import Episode
from agentlightning.learner.packing import CreditedCall
from agentlightning.types import Call
from agentlightning.types.arrays import np

Continuations = Mapping[int, Sequence[Episode]]
"""Of one rollout: those that go on from the state before the call of this index."""


def with_continuations(
    batches: Sequence[Sequence[CreditedCall]],
    episodes: Sequence[Episode],
    rule: CreditRule,
    going_on: Mapping[str, Continuations],
    *,
    with_their_rollout: bool = True,
) -> list[list[CreditedCall]]:
    """The minibatches with the calls of continuations, each in that of the rollout it goes on from.

    `batches`: the credit of `episodes` by `rule`; rollouts whose calls are not in it are passed over, so keep those
    without advantage. `going_on`: by rollout id. Every continuation counts and has one unit.
    `with_their_rollout`: as above. If not, the rollout keeps its weight, continuations are compared with each other
    alone, and the m of a state have together the weight of one rollout: for a state that was chosen by what its rollout
    earned, and for two continuations or more.
    """
    units = make_units(episodes, rule, {})
    counts_U = np.array([u.counts for u in units], dtype=bool)
    found: list[list[CreditedCall]] = []
    for batch in batches:
        by_id = {c.call.info.call_id: c for c in batch}
        added: list[CreditedCall] = []
        for n, unit in enumerate(units):
            root = episodes[unit.rollout]
            branches = going_on.get(root.rollout.rollout_id, {})
            own = [by_id[c.info.call_id] for c in unit.calls if c.info.call_id in by_id]
            if not branches or not own:
                continue
            weight, group, share = plain_weight(own[0]), own[0].group, 1.0
            worth = estimated(units, rule, counts_U, n)
            for at, siblings in sorted(branches.items()):
                ends = [make_units([e], rule, {})[0] for e in siblings]
                earned = [end.total for end in ends]
                if with_their_rollout:
                    earned.append(unit.total)
                    _scale(by_id, root.calls[at:], 1 / len(earned))
                    share /= len(earned)
                else:
                    share = 1 / len(earned)
                for end in ends:
                    others = (sum(earned) - end.total) / (len(earned) - 1)
                    advantage = worth(end.total) - worth(others)
                    sequence = 1 + max(c.sequence for c in [*batch, *added])
                    added += _credited(end, sequence, group, advantage, weight * share)
        found.append([*by_id.values(), *added])
    return found


def _scale(by_id: dict[str, CreditedCall], calls: Sequence[Call], share: float) -> None:
    """Let calls weigh `share` of what they did."""
    for call in calls:
        if (credited := by_id.get(call.info.call_id)) is not None:
            by_id[call.info.call_id] = replace(credited, weights=credited.weights * np.float32(share))


def _credited(unit: Unit, sequence: int, group: int, advantage: float, weight: float) -> list[CreditedCall]:
    """The calls of a continuation that were sampled; none of one that teaches nothing."""
    return [
        CreditedCall(
            call=call,
            sequence=sequence,
            group=group,
            advantages=np.full(len(call.response_ids), advantage, dtype=np.float32),
            weights=as_drawn(call, weight),
            returns=None,
        )
        for call in unit.calls
        if advantage
    ]
