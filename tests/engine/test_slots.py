"""Placing prompts into slots: what is reused, what is kept, what is given up."""

from __future__ import annotations

import numpy as np

from agentlightning.engine.slots import SlotPlacement, Slots
from agentlightning.types.call import Int32Array


def ids(*runs: tuple[int, int]) -> Int32Array:
    """Runs of (token, how often)."""
    return np.concatenate([np.full(count, token, dtype=np.int32) for token, count in runs])


def compute(slots: Slots, prompt: Int32Array) -> int:
    """Place a prompt and mark all of it as computed."""
    placement = slots.place(prompt)
    assert placement is not None
    slots.occupy(placement, prompt)
    slots.computed[placement.slot] = len(prompt)
    return placement.slot


def test_a_longer_prompt_continues_its_own_slot() -> None:
    slots = Slots(4, 100)
    slot = compute(slots, ids((1, 20)))
    slots.release(slot)
    assert slots.place(ids((1, 20), (2, 5))) == SlotPlacement(slot, slot, 20)


def test_a_fork_copies_and_leaves_the_other_end_alone() -> None:
    slots = Slots(4, 100)
    slot = compute(slots, ids((1, 20), (2, 10)))
    slots.release(slot)
    placement = slots.place(ids((1, 20), (3, 10)))
    assert placement is not None
    assert placement.slot != slot
    assert (placement.source, placement.reused) == (slot, 20)


def test_a_running_request_lends_its_prefix() -> None:
    slots = Slots(2, 100)
    slot = compute(slots, ids((1, 20)))
    placement = slots.place(ids((1, 20), (2, 5)))
    assert placement == SlotPlacement(1 - slot, slot, 20)


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    slots = Slots(2, 100)
    slots.release(compute(slots, ids((1, 20))))
    placement = slots.place(ids((1, 20)))
    assert placement is not None
    assert placement.reused == 19


def test_the_slot_unused_for_longest_is_given_up_first() -> None:
    slots = Slots(3, 100)
    for token in (1, 2, 3):
        slots.release(compute(slots, ids((token, 20))))
    slots.release(compute(slots, ids((1, 30))))
    placement = slots.place(ids((9, 20)))
    assert placement is not None
    assert slots.tokens[placement.slot, 0] == 2


def test_a_few_shared_tokens_are_not_worth_a_copy() -> None:
    slots = Slots(2, 100)
    compute(slots, ids((1, 4), (2, 20)))
    placement = slots.place(ids((1, 4), (3, 20)))
    assert placement is not None
    assert placement.reused == 0


def test_waiting_for_a_prefix_that_is_being_computed() -> None:
    slots = Slots(4, 100)
    placement = slots.place(ids((1, 60)))
    assert placement is not None
    slots.occupy(placement, ids((1, 60)))
    assert slots.place(ids((1, 60))) is None
    assert slots.place(ids((1, 20), (2, 40))) is not None
    slots.computed[placement.slot] = 60
    assert slots.place(ids((1, 60))) == SlotPlacement(1, placement.slot, 59)


def test_forgotten_slots_lend_nothing() -> None:
    slots = Slots(2, 100)
    slot = compute(slots, ids((1, 20)))
    slots.forget(slot)
    placement = slots.place(ids((1, 21)))
    assert placement is not None
    assert placement.reused == 0


def test_swap_exchanges_everything() -> None:
    slots = Slots(3, 100)
    a = compute(slots, ids((1, 20)))
    b = compute(slots, ids((2, 30)))
    slots.release(b)
    assert slots.swap(a, b) == (20, 30)
    assert (slots.length[[a, b]].tolist(), slots.busy[[a, b]].tolist()) == ([30, 20], [False, True])
    assert slots.place(ids((2, 31))) == SlotPlacement(a, a, 30)
