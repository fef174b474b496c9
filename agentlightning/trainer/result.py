"""What a run left behind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a run left behind."""

    run_dir: Path
    checkpoint: Path | None
    """The last checkpoint; None if none was written."""
    stopped: bool
    """The user stopped it before its end."""
    metrics: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """A row per step, as in `metrics.jsonl`: `step`, `reward`, `val_reward`, …"""

    @property
    def learned(self) -> bool:
        """Whether any step changed the weights. A run without steps has nothing to answer for."""
        updates = [value for m in self.metrics for name, value in m.items() if name.split("/")[-1] == "updates"]
        return not updates or any(updates)
