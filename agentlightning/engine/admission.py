"""When waiting requests begin, and how many of them. Plain bookkeeping, no tensors."""

from __future__ import annotations

from agentlightning.engine.queue import RequestQueue

PREFILL_COST = 0.25
"""What a prefill costs however short it is, in steps; measured best on small models between 0.1 and 0.5."""
KEPT_FREE = 8
"""One of so many places is kept from owners who hold many."""


class Admission:
    """Of the requests of a queue, to `most` places in so many slots."""

    def __init__(self, queue: RequestQueue, most: int, slots: int) -> None:
        self._queue = queue
        self._most = most
        self._slots = slots
        self._held_back = 0

    def places(self, running: int) -> tuple[int, int]:
        """How many more requests may start: of anyone, and of owners of whom none is running.

        The second is more when one owner holds many: a few places are beyond their reach, so that nobody waits for the
        end of another's long responses.
        """
        kept_free = max(1, self._most // KEPT_FREE)
        if max(self._queue.running.values(), default=0) <= kept_free:
            return self._most - running, self._most - running
        most = min(self._most + kept_free, self._slots)
        return most - kept_free - running, most - running

    def is_worthwhile(self, waiting: int, running: int) -> bool:
        """Whether waiting requests should start now rather than be joined by others. Asked once per step.

        A prefill costs part of a step, however few tokens it computes; a request held back for a step costs its share
        of that step. So they are held until the second sum reaches the first; not where one owner holds many places.
        """
        places, places_for_new = self.places(running)
        self._held_back += min(waiting, max(places, places_for_new))
        if self._held_back < running * PREFILL_COST and places == places_for_new:
            return False
        self._held_back = 0
        return True
