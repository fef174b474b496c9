"""Kept tokens: the learner's log-probs are over what the filter left when the token was drawn, as before so afterwards.

The reference is a plain forward of the Hugging Face model and a softmax over the named logits, written out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from agentlightning.algorithm.credit.assignment import as_drawn
from agentlightning.engine.base import SamplingParams, concat
from agentlightning.engine.events import Ended, PartialSample, Request, SampledTokens
from agentlightning.engine.torch_engine import TorchEngine
from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.learner.packing import CreditedCall, pack, split_batch
from agentlightning.learner.policy import Policy
from agentlightning.learner.torch_learner import TorchLearner
from agentlightning.types.arrays import kept_table
from agentlightning.types.call import Call

from .conftest import call_info

FILTERS = [{"top_p": 0.6}, {"top_k": 5}, {"min_p": 0.3}, {"top_p": 0.9, "temperature": 0.7}, {}]


def sampled_call(engine: TorchEngine, number: int, *, stream: bool = False, **filters: Any) -> Call:
    """What the engine samples and says, as the gateway writes it down."""
    prompt = np.random.default_rng(number % 2).integers(10, 250, 6).astype(np.int32)
    params = SamplingParams(max_tokens=8, seed=number, keeps=True, **filters)
    engine.submit(Request(request_id=number, prompt_ids=prompt, params=params, stream=stream))
    chunks: list[Any] = []
    while engine.active:
        for event in engine.step():
            if isinstance(event, SampledTokens):
                of_event = {name: getattr(event, name) for name in ("ids", "logprobs", "plain_logprobs", "kept")}
                chunks.append((of_event, None))
            elif isinstance(event, Ended | PartialSample):
                chunks.append((None, event.chunk))
    last = chunks[-1][1]
    whole = concat([last if of is None else msgspec.structs.replace(last, **of) for of, last in
                    [(of, chunk if chunk is not None else last) for of, chunk in chunks]])  # fmt: skip
    info = call_info(f"r{number}", filters.get("temperature", 1.0))
    return Call(info, prompt, whole.ids, whole.logprobs, whole.plain_logprobs, (), whole.kept)


def by_hand(policy: Policy, call: Call) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([call.prompt_ids, call.response_ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = policy.model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1].double() / call.info.temperature
    table = kept_table(call.kept, len(call.response_ids))
    found: list[float] = []
    for row, token, kept in zip(logits, call.response_ids.tolist(), table, strict=True):
        named = [int(t) for t in kept if t >= 0] or list(range(len(row)))
        found.append(float(row[token] - torch.logsumexp(row[named], 0)))
    return np.array(found)


@pytest.fixture
def calls(policy: Policy) -> list[Call]:
    engine = TorchEngine(policy.model, policy.tokenizer, (0,), max_context=64, max_concurrency=4)
    return [sampled_call(engine, n, stream=n % 3 == 1, **FILTERS[n % len(FILTERS)]) for n in range(10)]


def credited(calls: list[Call]) -> list[CreditedCall]:
    ones = [np.ones(len(call.response_ids), dtype=np.float32) for call in calls]
    return [CreditedCall(call, n, n % 2, one, one) for n, (call, one) in enumerate(zip(calls, ones, strict=True))]


def test_ratios_are_one_before_an_update_and_over_the_same_tokens_after_it(policy: Policy, calls: list[Call]) -> None:
    learner, batch = TorchLearner(policy), pack(credited(calls))
    assert batch.kept_EK is not None
    assert any(call.kept is None for call in calls), "nothing is written down where nothing was cut away"
    plain = np.concatenate([call.plain_logprobs for call in calls])
    assert np.abs(batch.old_logprobs_E - plain).max() > 0.1, "the filters had an effect"
    np.testing.assert_allclose(learner.forward(batch), batch.old_logprobs_E, atol=1e-4)
    for rows in (False, True):
        learner.rows = rows
        learner.forward_backward(batch, LossConfig(name="reinforce"))
        learner.optim_step(OptimParams(learning_rate=1e-2))
        expected = np.concatenate([by_hand(policy, call) for call in calls])
        assert np.abs(expected - batch.old_logprobs_E).max() > 0.01, "the weights moved"
        np.testing.assert_allclose(learner.forward(batch), expected, atol=1e-4)


def test_the_gradient_is_that_of_the_softmax_over_the_kept_tokens(policy: Policy, calls: list[Call]) -> None:
    learner, batch = TorchLearner(policy), pack(credited(calls))
    learner.forward_backward(batch, LossConfig(name="reinforce"))
    found = [g for g in learner.take_gradient() if g is not None]
    total: Any = torch.zeros(())
    for call in calls:
        ids = torch.from_numpy(np.concatenate([call.prompt_ids, call.response_ids]).astype(np.int64))[None]
        logits = policy.model(input_ids=ids).logits[0, len(call.prompt_ids) - 1 : -1] / call.info.temperature
        table = kept_table(call.kept, len(call.response_ids))
        for row, token, kept in zip(logits, call.response_ids.tolist(), table, strict=True):
            named = [int(t) for t in kept if t >= 0] or list(range(len(row)))
            total = total - (row[token] - torch.logsumexp(row[named], 0))
    expected = torch.autograd.grad(total, [p for p in policy.model.parameters() if p.requires_grad])
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


def test_what_is_known_exactly_needs_no_weight(calls: list[Call]) -> None:
    for call in calls:
        assert (as_drawn(call, 1.0) == 1.0).all()
    filtered = replace(calls[0], kept=None)
    assert (as_drawn(filtered, 1.0) < 1.0).any(), "as it is where nobody wrote down what was kept"


def test_parts_for_several_ranks_have_their_rows(policy: Policy, calls: list[Call]) -> None:
    learner, batch = TorchLearner(policy), pack(credited(calls))
    whole = learner.forward(batch)
    for part in split_batch(batch, 2):
        np.testing.assert_allclose(learner.forward(part.batch), whole[part.entries], atol=1e-5)
