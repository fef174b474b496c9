"""Memory of contexts in blocks: many short contexts, long ones that must wait, and the same numbers as with plenty."""

from __future__ import annotations

import numpy as np
import pytest

from agentlightning.engine.base import SamplingParams
from agentlightning.engine.block_pool import BlockPool
from agentlightning.engine.events import Ended, Request
from agentlightning.engine.kv_cache import SUPPORTED, block_tokens, probe
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.learner.policy import Policy
from tests.engine.conftest import gap, make_engine, random_ids, run

pytestmark = pytest.mark.skipif(not SUPPORTED, reason="pages are given back on Linux only")

CONTEXT = 250
EXACT = 1e-4


@pytest.fixture
def narrow(policy: Policy) -> TorchEngine:
    """Three whole contexts for eight requests."""
    per_token = probe(policy.model).bytes_per_token
    return make_engine(policy, max_context=CONTEXT, kv_budget_bytes=per_token * 256 * 3, max_concurrency=8)


def room(engine: TorchEngine) -> BlockPool:
    assert engine._memory is not None
    return engine._memory


def asking(number: int, prompt: int, tokens: int) -> Request:
    params = SamplingParams(max_tokens=tokens, seed=number, stop_token_ids=())
    return Request(request_id=number, prompt_ids=random_ids(prompt, number), params=params)


def check(engine: TorchEngine) -> None:
    """What always holds."""
    memory, slots = room(engine), engine._slots
    assert memory.free >= 0
    assert (slots.computed <= memory.held * memory._budget.tokens).all()
    assert not (slots.parked & ~slots.busy).any()


def test_short_contexts_are_sampled_all_at_once(narrow: TorchEngine) -> None:
    for number in range(8):
        narrow.submit(asking(number, 9, 40))
    narrow.step()
    assert narrow.running == 8
    while narrow.active:
        narrow.step()
        check(narrow)


@pytest.mark.slow
def test_long_ones_wait_and_come_out_the_same(policy: Policy, narrow: TorchEngine) -> None:
    policy.model.generation_config.eos_token_id = None
    plenty = make_engine(policy, max_context=CONTEXT, max_concurrency=8)
    assert plenty._memory is None
    requests = [asking(number, 20 + 9 * number, 240) for number in range(10)]
    expected = run(plenty, requests)
    for request in requests:
        narrow.submit(request)
    found, parked = {}, 0
    while narrow.active:
        found |= {e.request_id: e.chunk for e in narrow.step() if isinstance(e, Ended)}
        parked = max(parked, int(narrow._slots.parked.sum()))
        check(narrow)
    assert parked > 0, "nothing ever had to wait: the test shows nothing"
    for request in requests:
        number = request.request_id
        assert found[number].ids.tolist() == expected[number].ids.tolist()
        assert gap(policy, request, found[number]) < EXACT


def test_idle_contexts_make_way_the_oldest_first(narrow: TorchEngine) -> None:
    first, second = asking(0, 200, 4), asking(1, 180, 4)
    run(narrow, [first])
    run(narrow, [second])
    run(narrow, [asking(number, 120, 4) for number in (2, 3)])
    assert run(narrow, [second])[1].cached_tokens > 100
    assert run(narrow, [first])[0].cached_tokens == 0
    check(narrow)


def test_aborts_and_new_weights_leave_nothing_held_in_vain(policy: Policy, narrow: TorchEngine) -> None:
    rng = np.random.default_rng(0)
    number = 0
    for turn in range(120):
        while narrow.running + narrow.waiting < 12:
            narrow.submit(asking(number, int(rng.integers(1, 200)), int(rng.integers(1, 200))))
            number += 1
        narrow.step(admit=turn % 7 != 0)
        check(narrow)
        if turn % 5 == 0:
            narrow.abort(int(rng.integers(0, number)))
        if turn % 40 == 39:
            narrow.weights_changed(turn)
        check(narrow)
    narrow.abort_all()
    last = asking(10_000, 9, 5)
    assert gap(policy, last, run(narrow, [last])[10_000]) < EXACT
    check(narrow)


def test_blocks_fill_whole_pages() -> None:
    assert block_tokens([256, 256]) == 16
    assert block_tokens([128]) == 32
    assert block_tokens([768]) == 16, "three pages"
    assert block_tokens([2 * 3 * 4]) is None, "a block would be 512 tokens"
