"""Which of several ways to improve an agent gets the next round: a bandit on what each gained per rollout. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

Arm = Literal["prompt", "weights"]
ARMS: tuple[Arm, ...] = ("prompt", "weights")


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The result of a finished round."""

    arm: Arm
    rollouts: int
    gain: float
    """How much more the agent earns on the same validation tasks than before the round."""

    @property
    def rate(self) -> float:
        """The gain in validation reward per hundred rollouts."""
        return 100 * self.gain / max(self.rollouts, 1)


def choose(rounds: Sequence[Round], memory: int, patience: int) -> tuple[Arm, str]:
    """The arm of the next round, and why.

    Each arm is tried once. Then it is the one that gained more per rollout in its last `memory` rounds; but one that
    was passed over for `patience` rounds is tried again, because what the other did may have made it worth something,
    and while neither gains they take turns.
    """
    for arm in ARMS:
        if all(r.arm != arm for r in rounds):
            return arm, "it was not tried yet"
    rates = {arm: fmean([r.rate for r in rounds if r.arm == arm][-memory:]) for arm in ARMS}
    waited = {arm: next(n for n, r in enumerate(reversed(rounds)) if r.arm == arm) for arm in ARMS}
    told = " and ".join(f"{arm} {rate:+.4f}" for arm, rate in rates.items())
    told = f"the last {memory} rounds of each gained per 100 rollouts: {told}"
    longest = max(ARMS, key=lambda arm: waited[arm])
    if waited[longest] >= patience:
        return longest, f"it was passed over for {waited[longest]} rounds; {told}"
    if max(rates.values()) <= 0:
        return longest, f"neither gains, so they take turns; {told}"
    return max(ARMS, key=lambda arm: rates[arm]), told
