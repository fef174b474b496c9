"""Which tokens every slot of the KV cache holds, which slot a new prompt should take, and what it can reuse there.

Plain numpy bookkeeping, no tensors. A slot is busy while a request samples in it; afterwards it keeps its tokens, so
that a later prompt with the same beginning finds its keys and values computed, until the slot is needed (oldest use
first).

Invariant: the first `computed` of a slot's `length` known tokens have keys and values of the current weights of the
policy that the slot is of; no other policy's prompt finds them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from agentlightning.types.call import Int32Array

WORTH_COPYING = 8
"""A shorter shared prefix is computed again rather than copied between slots."""
NOBODY = -1
"""In place of a policy: a prompt of which nothing is taken from slots."""
WORTH_WAITING = 32
"""A new prompt waits for a prefix that a running one is computing just now, if it spares at least so many tokens."""


@dataclass(frozen=True, slots=True)
class SlotPlacement:
    """Where a prompt goes: into `slot`, with the first `reused` tokens taken from `source` (maybe the slot itself)."""

    slot: int
    source: int
    reused: int


class Slots:
    """Tokens and states of `count` slots with room for `capacity` tokens each."""

    def __init__(self, count: int, capacity: int, *, cuts: bool = True, reuses: bool = True) -> None:
        """`cuts` is whether the beginning of what a slot holds can be used alone, `reuses` whether anything can."""
        self.count = count
        self._cuts = cuts
        self._reuses = reuses
        self.tokens = np.zeros((count, capacity), dtype=np.int32)
        self.length = np.zeros(count, dtype=np.int64)
        self.computed = np.zeros(count, dtype=np.int64)
        self.busy = np.zeros(count, dtype=np.bool_)
        self.parked = np.zeros(count, dtype=np.bool_)
        """Busy slots that wait for memory: neither `ready` nor `unready`."""
        self.held = np.zeros(count, dtype=np.bool_)
        """The same of those whose policy is not computed now."""
        self.policy = np.zeros(count, dtype=np.int64)
        """Whose tokens they are."""
        self._last_use = np.zeros(count, dtype=np.int64)
        self._clock = 0

    def place(self, prompt: Int32Array, policy: int = 0) -> SlotPlacement | None:
        """The slot for a policy's prompt. None: wait, a running request is computing a longer shared prefix.

        At least one slot must be free. The last token of a prompt is never reused: its logits are needed.
        """
        shared = np.minimum(self._shared(prompt, policy), len(prompt) - 1)
        ready = np.minimum(shared, self.computed)
        if not self._cuts:
            ready = shared = np.where((shared == self.computed) & self._reuses, shared, 0)
        source = int(ready.argmax())
        reused = int(ready[source])
        promised = int((shared * self.busy).max())
        if promised - reused >= WORTH_WAITING:
            return None
        if not self.busy[source] and reused and reused == self.computed[source]:
            return SlotPlacement(source, source, reused)
        slot = int(np.where(self.busy, np.iinfo(np.int64).max, self._last_use).argmin())
        if reused < WORTH_COPYING and slot != source:
            return SlotPlacement(slot, slot, 0)
        return SlotPlacement(slot, source, reused)

    def occupy(self, placement: SlotPlacement, prompt: Int32Array, policy: int = 0) -> None:
        """Give the slot to a policy's prompt. The cache's keys and values are copied by the caller."""
        slot = placement.slot
        self.tokens[slot, : len(prompt)] = prompt
        self.length[slot] = len(prompt)
        self.computed[slot] = placement.reused
        self.busy[slot] = True
        self.held[slot] = False
        self.policy[slot] = policy
        self._touch(slot)
        self._touch(placement.source)

    def release(self, slot: int) -> None:
        """The request is done; what was computed stays for reuse."""
        self.busy[slot] = self.parked[slot] = False
        self.length[slot] = self.computed[slot]
        self._touch(slot)

    def forget(self, slot: int) -> None:
        """Drop what a slot holds; it is the first to be taken."""
        self.busy[slot] = self.parked[slot] = False
        self.length[slot] = self.computed[slot] = self._last_use[slot] = 0

    @property
    def going(self) -> np.ndarray:
        """Which slots are being computed, shape [count]."""
        return self.busy & ~self.parked & ~self.held

    def ready(self) -> np.ndarray:
        """Busy slots whose tokens are all computed but the last one, ascending."""
        return np.flatnonzero(self.going & (self.length - self.computed == 1))

    def unready(self) -> np.ndarray:
        """Which busy slots have more tokens than one to compute, shape [count]."""
        return self.going & (self.length - self.computed > 1)

    def missing(self, slot: int) -> int:
        """How many known tokens of the slot have no keys and values yet; 0 of one that is parked or held."""
        waits = self.parked[slot] or self.held[slot]
        return 0 if waits else int(self.length[slot] - self.computed[slot])

    def by_last_use(self, chosen: np.ndarray) -> list[int]:
        """These slots, bool [count], the one that was not used for longest first."""
        return sorted(np.flatnonzero(chosen).tolist(), key=self._last_use.__getitem__)

    def swap(self, a: int, b: int) -> tuple[int, int]:
        """Exchange two slots; returns how many tokens of each must be exchanged in the cache too."""
        pair, riap = [a, b], [b, a]
        known = int(self.length[pair].max())
        self.tokens[pair, :known] = self.tokens[riap, :known]
        states = (self.busy, self.parked, self.held, self.policy)
        for column in (self.length, self.computed, *states, self._last_use):
            column[pair] = column[riap]
        return int(self.computed[b]), int(self.computed[a])

    def _shared(self, prompt: Int32Array, policy: int) -> np.ndarray:
        """How many leading tokens of the policy's prompt each slot knows, shape [count]."""
        differs = self.tokens[:, : len(prompt)] != prompt
        first = differs.argmax(axis=1)
        same = np.where(differs[np.arange(self.count), first], first, len(prompt))
        return np.minimum(same, self.length) * (self.policy == policy)

    def _touch(self, slot: int) -> None:
        self._clock += 1
        self._last_use[slot] = self._clock
