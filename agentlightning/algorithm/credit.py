"""Credit assignment: what each sampled token of a step's episodes is worth. Pure.

`broadcast`: a rollout's advantage goes to every token that was sampled in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from agentlightning.algorithm.episode import Episode
from agentlightning.learner.advantage import entry_weights, group_advantages
from agentlightning.learner.packing import CreditedCall
from agentlightning.types import Outcome
from agentlightning.types.call import Float32Array, Int32Array

Use = Literal["train", "zero", "mask"]

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


def credit(
    episodes: Sequence[Episode],
    uses: Mapping[Outcome, Use],
    *,
    minibatches: int,
    normalize_std: bool,
    normalization: str,
) -> list[list[CreditedCall]]:
    """Advantages over groups, spread over the calls of each rollout; in minibatches of whole groups.

    A masked rollout changes nothing about its siblings. Rollouts whose advantage is 0 have no gradient and are dropped,
    but keep their share in the normalisation. Minibatches with nothing to learn are left out.
    """
    returns_R, counts_R = returns(episodes, uses)
    groups_R = group_numbers(episodes)
    tokens_R = np.array([e.sampled_tokens for e in episodes], dtype=np.int32)
    advantages_R = group_advantages(returns_R, groups_R, counts_R, normalize_std=normalize_std)
    batches: list[list[CreditedCall]] = []
    for groups in np.array_split(np.unique(groups_R), minibatches):
        members_R = np.isin(groups_R, groups)
        weights_R = entry_weights(tokens_R, counts_R & members_R, normalization)
        batches.append(
            [
                _credited(call, r, int(groups_R[r]), advantages_R[r], weights_R[r])
                for r in np.flatnonzero(members_R & (advantages_R != 0)).tolist()
                for call in episodes[r].calls
                if call.info.trained and len(call.response_ids)
            ]
        )
    return [batch for batch in batches if batch]


def returns(episodes: Sequence[Episode], uses: Mapping[Outcome, Use]) -> tuple[Float32Array, np.ndarray]:
    """Each rollout's return, and whether it counts. A rollout that should train but has no reward is masked."""
    rewards = [e.reward if uses[e.outcome] == "train" else None for e in episodes]
    counts_R = [r is not None or uses[e.outcome] == "zero" for e, r in zip(episodes, rewards, strict=True)]
    return np.array([r or 0.0 for r in rewards], dtype=np.float32), np.array(counts_R, dtype=bool)


def group_numbers(episodes: Sequence[Episode]) -> Int32Array:
    """The group of each rollout as a number; siblings carry the same `group` in their metadata."""
    numbers: dict[Any, int] = {}
    return np.array(
        [numbers.setdefault(e.rollout.metadata.get("group"), len(numbers)) for e in episodes], dtype=np.int32
    )


def _credited(call: Any, sequence: int, group: int, advantage: float, weight: float) -> CreditedCall:
    n = len(call.response_ids)
    return CreditedCall(
        call=call,
        sequence=sequence,
        group=group,
        advantages=np.full(n, advantage, dtype=np.float32),
        weights=np.full(n, weight, dtype=np.float32),
    )
