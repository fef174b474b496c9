"""Whether a process that has work to do gets on with it, judged by its progress and never by how long work takes. Pure.

Progress is passes computed or processor time used. A process that is suspended, or waits for something that never
comes, makes none; one that computes a long pass does, and one that has nothing to do owes none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

PULSE_SECONDS = 2.0
"""How often a process says how far it is."""
WARN_SECONDS = 15.0
"""Without progress for so long it is said on the screen."""
_LEAST_CPU = 0.01
"""Processor seconds between two pulses that are more than the pulse itself."""


@dataclass(slots=True)
class StallWatch:
    """Looks at a process once a second. `limit` is how many seconds without progress are too many."""

    limit: float
    quiet: float = 0.0
    """Seconds without progress."""
    _passes: int = field(default=0, repr=False)
    _cpu: float = field(default=0.0, repr=False)

    seen: bool = False
    """Whether the process has said anything of itself; before that it is not judged."""

    def pulse(self, passes: int, cpu_seconds: float, *, idle: bool = False) -> None:
        """What the process says of itself; `idle` is whether it has nothing to do just now."""
        if idle or not self.seen or passes != self._passes or cpu_seconds - self._cpu >= _LEAST_CPU:
            self.quiet = 0.0
        self.seen = True
        self._passes, self._cpu = passes, cpu_seconds

    def moved(self) -> None:
        """It gave something out."""
        self.quiet = 0.0

    def look(self, *, busy: bool, seconds: float = 1.0) -> Literal["fine", "slow", "stalled"]:
        """`busy` is whether something is asked of it, `seconds` how long ago the last look was.

        "slow" is said once. A look that comes late counts as one second: then it was the watcher who stood still.
        """
        if not busy or not self.seen:
            self.quiet = 0.0
            return "fine"
        before = self.quiet
        self.quiet += min(seconds, 1.0)
        if self.quiet >= self.limit:
            return "stalled"
        return "slow" if before < WARN_SECONDS <= self.quiet else "fine"
