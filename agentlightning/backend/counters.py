"""What the engines of a backend have done since its start, counted where their answers arrive; and the seeds of
requests that bring none, so that several engines never draw the same tokens.
"""

from __future__ import annotations

import itertools
import time
import zlib
from dataclasses import dataclass, field
from typing import Any

from agentlightning.backend.base import BackendStats
from agentlightning.backend.fleet import Fleet


@dataclass(slots=True)
class Counters:
    """What the engines of all policies did since the start."""

    sampled: int = 0
    prefilled: int = 0
    cached: int = 0
    running: int = 0
    busy_seconds: float = 0.0
    """Wall-clock seconds in which something was sampled."""
    _since: float = field(default=0.0, repr=False)

    def begin(self) -> None:
        if not self.running:
            self._since = time.perf_counter()
        self.running += 1

    def end(self) -> None:
        self.running -= 1
        if not self.running:
            self.busy_seconds += time.perf_counter() - self._since

    def as_stats(self, learner: BackendStats, fleet: Fleet[Any], published_bytes: int) -> BackendStats:
        """As statistics, with those of the learner's process. Sampling and learning may go on at the same time; idle is
        when neither did."""
        took = {one.name: one.publication_seconds for one in fleet.replicas if one.publication_seconds}
        return BackendStats(
            sampling_s=self.busy_seconds,
            learning_s=learner.learning_s,
            idle_s=max(0.0, learner.idle_s - self.busy_seconds),
            tokens_sampled=self.sampled,
            prefill_tokens=self.prefilled,
            cached_tokens=self.cached,
            running=self.running,
            waiting=0,
            published_bytes=published_bytes,
            publication_seconds=took,
        )


class Seeds:
    """Seeds for requests: the same ones, in the same order, after the same `reseed`."""

    def __init__(self, seed: int | None) -> None:
        self.reseed(seed)

    def reseed(self, seed: int | None) -> None:
        self._seed = seed
        self._numbers = itertools.count()

    def next(self) -> int | None:
        if self._seed is None:
            return None
        return zlib.crc32(f"{self._seed}/{next(self._numbers)}".encode())
