"""Now and then a packed token tree is compared with its separate rows: log-probs and gradients must be the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, Update
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.learner.base import ChecksPacking
from agentlightning.learner.packing import CreditedCall, pack, unique_tokens
from agentlightning.metrics.catalogue import ENGINE, Metric

TRUSTED = "This backend cannot compare packed token trees with separate rows; it is trusted."


@dataclass(frozen=True, kw_only=True)
class PackingComparison(Part):
    """Compares every so many steps."""

    metrics = (
        Metric(
            "packing_gap_logprobs",
            "Gap of packing: log-probs",
            ENGINE,
            "",
            "The largest relative difference of log-probs between a packed group and its separate rows.",
        ),
        Metric(
            "packing_gap_gradients",
            "Gap of packing: gradients",
            ENGINE,
            "",
            "The largest relative difference of gradients between a packed group and its separate rows.",
        ),
    )

    every: int = 50

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        return cls(every=settings.check_packing_every) if settings.check_packing_every else None

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _PackingComparison(self.every, policy)


class _PackingComparison(PolicyHooks):
    def __init__(self, every: int, policy: PolicyScope) -> None:
        self._every = every
        self._policy = policy
        self._trusts = False

    async def after_credit(self, update: Update) -> None:
        if not update.is_due(self._every) or not any(update.batches):
            return
        learner = self._policy.learner
        if isinstance(learner, ChecksPacking):
            await self._compare(learner, update, next(filter(None, update.batches)))
        elif not self._trusts:
            self._trusts = True
            self._policy.reporter.note(TRUSTED)

    async def _compare(self, learner: ChecksPacking, update: Update, batch: Sequence[CreditedCall]) -> None:
        """Compare a pass of the smallest group with its rows; the learner itself falls back to rows."""
        groups = {c.group: [d for d in batch if d.group == c.group] for c in batch}
        smallest = self._policy.split(min(groups.values(), key=unique_tokens))[-1]
        found = await learner.check_packing(pack(smallest), self._policy.settings.loss_config())
        if not found.holds:
            self._policy.reporter.warn(
                f"A packed token tree and its separate rows disagree (log-probs by {found.logprobs:.1e}, gradients by "
                f"{found.gradients:.1e}, relative): from here on every row is computed by itself, which is exact but "
                "slower. This model's attention is not what the packing takes it for: please report it."
            )
        update.metrics |= {"packing_gap_logprobs": found.logprobs, "packing_gap_gradients": found.gradients}
