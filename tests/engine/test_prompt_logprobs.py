"""Log-probs of a prompt's own tokens, beside a plain forward: in pieces, among others, under new weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.engine.base import Chunk, SamplingParams
from agentlightning.engine.events import Request
from agentlightning.errors import ConfigError
from agentlightning.learner.policy import Policy

from .conftest import collect, concat, gap, make_engine, random_ids, reference, request, run

EXACT = 2e-5


def scoring(number: int, prompt: Any, top: int = 0, **params: Any) -> Request:
    return Request(request_id=number, prompt_ids=prompt, params=SamplingParams(prompt_logprobs=top, **params))


def prompt_gap(policy: Policy, asked: Request, chunk: Chunk) -> float:
    """Largest difference from a plain forward; also of the alternatives, which must be the most probable ones."""
    assert chunk.prompt is not None
    top = asked.params.prompt_logprobs or 0
    ids = torch.from_numpy(asked.prompt_ids.astype(np.int64))[None]
    with torch.no_grad():
        plain = policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    expected = reference(policy, asked.prompt_ids[:1], asked.prompt_ids[1:])
    gaps = [float(np.abs(expected - chunk.prompt.logprobs).max())]
    if top:
        assert chunk.prompt.top_ids is not None
        assert chunk.prompt.top_logprobs is not None
        gaps.append(float(np.abs(plain.topk(top).values.numpy() - chunk.prompt.top_logprobs).max()))
        named = plain.gather(1, torch.from_numpy(chunk.prompt.top_ids.astype(np.int64))).numpy()
        gaps.append(float(np.abs(named - chunk.prompt.top_logprobs).max()))
    else:
        assert chunk.prompt.top_ids is None
    return max(gaps)


@pytest.mark.parametrize("settings", [{}, {"prefill_tokens": 16}, {"kv_budget_bytes": 200_000}])
def test_scored_prompts_are_exact_beside_others_and_disturb_none(policy: Policy, settings: dict[str, int]) -> None:
    engine = make_engine(policy, max_context=160, max_concurrency=4, **settings)
    shared = random_ids(50, 1)
    asked = [
        request(0, shared, max_tokens=20),
        scoring(1, shared, 3, max_tokens=5, temperature=0.5),
        scoring(2, np.concatenate([shared, random_ids(40, 2)]), 0, max_tokens=1),
        request(3, np.concatenate([shared, random_ids(9, 3)]), max_tokens=20),
        scoring(4, shared, 2, max_tokens=9),
        scoring(5, random_ids(2, 4), 1, max_tokens=2),
    ]
    found = run(engine, asked)
    for one in asked:
        assert gap(policy, one, found[one.request_id]) < EXACT
        if one.params.prompt_logprobs is None:
            assert found[one.request_id].prompt is None
        else:
            assert prompt_gap(policy, one, found[one.request_id]) < EXACT, one
            assert found[one.request_id].cached_tokens == 0, "of tokens that are not computed nothing is known"


def test_scoring_in_many_pieces_and_while_the_weights_change(policy: Policy) -> None:
    """Pieces of 16 tokens: what was scored before the change is scored again."""
    engine = make_engine(policy, max_context=160)
    engine._scored_tokens = 16  # pyright: ignore[reportPrivateUsage]  # as with a vocabulary of a million
    asked = scoring(0, random_ids(100, 5), 2, max_tokens=3)
    parts: dict[int, list[Chunk]] = {}
    engine.submit(asked)
    collect(engine.step(), parts)
    collect(engine.step(), parts)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.01)
    engine.weights_changed(1)
    while engine.active:
        collect(engine.step(), parts)
    assert prompt_gap(policy, asked, concat(parts[0])) < EXACT


def test_a_prompt_of_one_token_has_nothing_to_score(policy: Policy) -> None:
    engine = make_engine(policy)
    found = run(engine, [scoring(0, random_ids(1, 1), 2, max_tokens=2)])[0]
    assert (len(found.ids), found.prompt) == (2, None)
    with pytest.raises(ConfigError, match="prompt_logprobs"):
        engine.submit(scoring(1, random_ids(3, 1), -1))
