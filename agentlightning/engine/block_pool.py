"""How much memory the contexts of a limited KV cache take: blocks, handed to slots as their tokens are computed.

Every slot has addresses for a whole context, and memory for as many blocks as it holds tokens (`kv_cache`). Where
a block is lacking, idle contexts are given up, oldest use first; then the youngest request is parked: it keeps its
tokens, loses its keys and values, and is computed again when there is room, before anything new begins. The oldest
request is never parked for others, so every request comes to its end.

Invariant: blocks held by all slots never exceed the total, and what a slot has computed lies in blocks that it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from agentlightning.engine.kv_cache import SlotCache
from agentlightning.engine.slots import SlotPlacement, Slots


@dataclass(frozen=True, slots=True)
class BlockBudget:
    """`total` blocks of so many tokens."""

    total: int
    tokens: int


class BlockPool:
    """The blocks of a cache whose memory is limited. It changes slots only by parking and by forgetting idle ones."""

    def __init__(self, cache: SlotCache, slots: Slots, budget: BlockBudget) -> None:
        self.held = np.zeros(slots.count, dtype=np.int64)
        """Blocks of each slot."""
        self._cache = cache
        self._slots = slots
        self._budget = budget

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return self._budget.total - int(self.held.sum())

    def admit(self, placement: SlotPlacement, tokens: int, running: int) -> SlotPlacement | None:
        """Room for a prompt, and for one more block of every running request; None: there is none now.

        Where it would only fit without the context that it could reuse, it is computed anew.
        """
        slot, source = placement.slot, placement.source
        if self._take(slot, tokens, spare=running, keep=source):
            self._shrink(slot, self._blocks(tokens))
            return placement
        if source == slot or self._slots.busy[source] or not self._take(slot, tokens, spare=running):
            return None
        self._shrink(slot, self._blocks(tokens))
        return SlotPlacement(slot, slot, 0)

    def grow(self, rows: np.ndarray, oldest_first: Sequence[int]) -> np.ndarray:
        """Room for one more token in each of these slots; those of them that were not parked for it.

        oldest_first: the slots of all running requests.
        """
        short = set(rows[self._slots.computed[rows] >= self.held[rows] * self._budget.tokens].tolist())
        if not short:
            return rows
        for slot in (s for s in oldest_first if s in short):
            while not self._slots.parked[slot] and not self._take(slot, int(self._slots.computed[slot]) + 1):
                self.park(next(s for s in reversed(oldest_first) if not self._slots.parked[s]))
        return rows[~self._slots.parked[rows]]

    def unpark(self, oldest_first: Sequence[int]) -> None:
        """Let parked requests go on, as far as there is room."""
        if not self._slots.parked.any():
            return
        waits = self._slots.parked | self._slots.held
        going = sum(not waits[s] for s in oldest_first)
        for slot in (s for s in oldest_first if self._slots.parked[s] and not self._slots.held[s]):
            if not self._take(slot, int(self._slots.length[slot]) + 1, spare=going):
                return
            self._slots.parked[slot] = False
            going += 1

    def swapped(self, a: int, b: int) -> None:
        """Two slots were exchanged, with their keys and values."""
        before = self.held[[a, b]]
        self.held[[a, b]] = before[::-1]
        shrunk = a if before[0] > before[1] else b
        if before[0] != before[1]:
            self._cache.give_back(shrunk, int(self.held[shrunk]) * self._budget.tokens)

    def forget(self, slot: int) -> None:
        """Take all blocks of a slot away; what it held is gone."""
        self._shrink(slot, 0)

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self._budget.tokens)

    def _take(self, slot: int, tokens: int, *, spare: int = 0, keep: int | None = None) -> bool:
        """Give a slot the blocks of so many tokens, if `spare` blocks more could be had; idle contexts make way."""
        lacking = self._blocks(tokens) - int(self.held[slot])
        if lacking <= 0:
            return True
        idle = ~self._slots.busy & (self.held > 0)
        idle[[slot, slot if keep is None else keep]] = False
        free = self.free
        if free + int(self.held[idle].sum()) < lacking + spare:
            return False
        for victim in self._slots.by_last_use(idle):
            if free >= lacking:
                break
            free += int(self.held[victim])
            self._slots.forget(victim)
            self._shrink(victim, 0)
        self.held[slot] += lacking
        return True

    def _shrink(self, slot: int, blocks: int) -> None:
        if self.held[slot] > blocks:
            self.held[slot] = blocks
            self._cache.give_back(slot, blocks * self._budget.tokens)

    def park(self, slot: int) -> None:
        """Take the memory of a running request, which is computed again when there is room."""
        self._slots.parked[slot] = True
        self._slots.computed[slot] = 0
        self._shrink(slot, 0)
