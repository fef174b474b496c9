"""Responses held to a grammar: always valid, drawn from what the grammar leaves, and no other request notices."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from agentlightning.engine.grammar import Grammars
from agentlightning.engine.sampler import RowSettings, draw
from agentlightning.errors import ConfigError
from agentlightning.learner.policy import Policy
from tests.engine.conftest import gap, make_engine, random_ids, request, run

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"tool": {"enum": ["add", "divide"]}, "a": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["tool", "a"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
GRAMMAR = LLMatcher.grammar_from_json_schema(SCHEMA)


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.0}, {"temperature": 2.0, "top_k": 5, "top_p": 0.9}])
def test_a_model_that_knows_no_json_writes_it(policy: Policy, settings: dict[str, Any]) -> None:
    engine = make_engine(policy)
    requests = [request(n, random_ids(9, n), max_tokens=60, grammar=GRAMMAR, **settings) for n in range(6)]
    responses = run(engine, requests)
    for asked in requests:
        chunk = responses[asked.request_id]
        answer = json.loads(str(policy.tokenizer.decode(chunk.ids[:-1].tolist())))
        assert chunk.finish_reason == "stop"
        assert answer["tool"] in ("add", "divide")
        assert 0 <= answer["a"] <= 99
        assert gap(policy, asked, chunk) < 1e-3, "the plain log-probs are the model's own"
        assert (chunk.logprobs >= chunk.plain_logprobs - 1e-5).all(), "what is left is more probable than before"


def test_logprobs_are_of_the_distribution_that_the_grammar_leaves(policy: Policy) -> None:
    asked = request(1, random_ids(9, 3), max_tokens=60, grammar=GRAMMAR)
    chunk = run(make_engine(policy), [asked])[1]
    ids = torch.from_numpy(np.concatenate([asked.prompt_ids, chunk.ids]).astype(np.int64))[None]
    with torch.no_grad():
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, len(asked.prompt_ids) - 1 : -1].float()
    matcher = Grammars(policy.tokenizer, logits.shape[-1], policy.eos_ids).begin(GRAMMAR, "a").matcher(30.0)
    assert matcher is not None
    for row, token, logprob in zip(logits, chunk.ids.tolist(), chunk.logprobs.tolist(), strict=True):
        mask = matcher.allowed()
        assert mask is not None
        assert mask[token]
        left = row.masked_fill(~mask, -torch.inf).log_softmax(-1)
        assert left[token].item() == pytest.approx(logprob, abs=1e-3)
        matcher.take(token)


def test_other_requests_do_not_notice(policy: Policy) -> None:
    free = [request(n, random_ids(12, n), max_tokens=20, seed=n) for n in range(3)]
    alone = run(make_engine(policy), free)
    held = [request(10 + n, random_ids(7, n), max_tokens=40, grammar=GRAMMAR) for n in range(3)]
    together = run(make_engine(policy), [x for pair in zip(free, held, strict=True) for x in pair])
    for asked in free:
        assert alone[asked.request_id].ids.tolist() == together[asked.request_id].ids.tolist()


def test_a_grammar_that_makes_no_sense_is_refused(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.engine.grammar._SOON", 60.0)  # a slow machine says it in a later step
    with pytest.raises(ConfigError, match="grammar"):
        make_engine(policy).submit(request(1, random_ids(5, 1), grammar="start: missing"))


def test_aborting_a_waiting_request_leaves_nothing_behind(policy: Policy) -> None:
    engine = make_engine(policy)
    for _ in range(2):
        engine.submit(request(1, random_ids(5, 1), max_tokens=40, grammar=GRAMMAR))
        engine.abort(1)
    assert len(run(engine, [request(1, random_ids(5, 1), max_tokens=4)])[1].ids) == 4


def test_filters_apply_to_what_the_grammar_leaves() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    rows = 1000
    uniform = (np.arange(rows) + 0.5) / rows
    mask = torch.tensor([False, True, True, True])
    settings = RowSettings(np.full(rows, 1.0), np.full(rows, 2), np.full(rows, 1.0), np.zeros(rows))
    drawn = draw(logits.expand(rows, -1), settings, uniform, dict.fromkeys(range(rows), mask))
    np.testing.assert_allclose(np.bincount(drawn.ids, minlength=4) / rows, [0, 0.6, 0.4, 0], atol=2 / rows)
    np.testing.assert_allclose(np.exp(drawn.plain_logprobs), logits.exp().numpy()[drawn.ids], atol=1e-6)
