"""How far a run is and where its time goes: what a step's row says of the clock."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from agentlightning.algorithm.asynchronous import Sampled
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend import Backend

TAUGHT_NOTHING = "nothing learned: siblings earned the same"


class Progress:
    """Keeps the time of a run since it began or was resumed."""

    def __init__(self, settings: TrainingSettings, tasks: int, done: int) -> None:
        """`tasks`: of an epoch. `done`: steps that were learned before."""
        self._settings = settings
        self._tasks = tasks
        self._done = done
        self._began = 0.0
        self._learning = self._learned = 0.0

    def begin(self) -> None:
        """A step begins; the first one counts."""
        self._began = self._began or time.time()

    def begin_learning(self) -> None:
        self._learning = time.time()

    def end_learning(self) -> None:
        self._learned = time.time()

    def of_step(self, done: int, sampled: Sampled, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Seconds and times of the step, how many steps there will be, the seconds left at the pace so far, and what is
        odd about the step."""
        steps = self._settings.steps_of(self._tasks)
        pace = (time.time() - self._began) / (done - self._done)
        updates = [value for name, value in metrics.items() if name.split("/")[-1] == "updates"]
        return {
            "sampling_seconds": sampled.ended - sampled.began,
            "learning_seconds": self._learned - self._learning,
            "sampling_from": sampled.began,
            "learning_from": self._learning,
            "time": time.time(),
            "steps": steps,
            "seconds_left": round(pace * max(0, steps - done), 1),
            **({"note": TAUGHT_NOTHING} if updates and not any(updates) else {}),
        }


async def time_split(backend: Backend) -> dict[str, float]:
    """Seconds since the start that the backend sampled, learned, and had nothing to do; and what was published."""
    stats = await backend.stats()
    if stats is None:
        return {}
    return {
        "model_sampling_seconds": stats.sampling_s,
        "model_learning_seconds": stats.learning_s,
        "model_idle_seconds": stats.idle_s,
        "cached_tokens": stats.cached_tokens,
        "prefill_tokens": stats.prefill_tokens,
        **({"published_bytes": stats.published_bytes} if stats.published_bytes else {}),
        **{f"publication_seconds/{name}": seconds for name, seconds in stats.publication_seconds.items()},
    }
