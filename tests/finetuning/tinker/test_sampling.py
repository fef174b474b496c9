"""Sampling by the official client: log-probs, seeds, stops, alternatives, and which weights it is from."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from .conftest import Running, datum, ids, prompt, training_client, types

pytestmark = pytest.mark.slow


def taught(service: Any, **given: Any) -> Any:
    """A training client whose adapter changes what is sampled."""
    client = training_client(service, **given)
    for _ in range(2):
        client.forward_backward([datum(ids(9, 10))], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
    return client


def sample(client: Any, tokens: np.ndarray, count: int = 1, **params: Any) -> list[Any]:
    given = types.SamplingParams(**{"max_tokens": 8, **params})
    return client.sample(prompt(tokens), num_samples=count, sampling_params=given).result().sequences


def test_sampled_log_probs_are_those_of_a_forward_pass(service: Any) -> None:
    client = taught(service)
    sampler, start = client.save_weights_and_get_sampling_client(), ids(1, 6)
    sequences = sample(sampler.result(), start, 6, seed=4)
    assert len({tuple(one.tokens) for one in sequences}) > 1
    assert len({one.sequence_id for one in sequences}) == 6
    data = [datum(np.concatenate([start, one.tokens])) for one in sequences]
    passed = client.forward(data, "cross_entropy").result()
    for one, output in zip(sequences, passed.loss_fn_outputs, strict=True):
        np.testing.assert_allclose(one.logprobs, output["logprobs"].to_numpy()[5:], atol=1e-4)


def test_a_prompts_log_probs_and_alternatives(service: Any) -> None:
    client = taught(service)
    sampler, tokens = client.save_weights_and_get_sampling_client().result(), ids(2, 9)
    expected = client.forward([datum(tokens)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].to_numpy()
    found = sampler.compute_logprobs(prompt(tokens)).result()
    assert found[0] is None
    np.testing.assert_allclose(found[1:], expected, atol=1e-4)
    response = sampler.sample(
        prompt(tokens),
        num_samples=2,
        sampling_params=types.SamplingParams(max_tokens=3),
        include_prompt_logprobs=True,
        topk_prompt_logprobs=4,
        topk_sample_logprobs=3,
    ).result()
    np.testing.assert_allclose(response.prompt_logprobs[1:], expected, atol=1e-4)
    assert response.topk_prompt_logprobs[0] in (None, [])
    for place, alternatives in enumerate(response.topk_prompt_logprobs[1:], 1):
        assert len(alternatives) == 4
        probabilities = [logprob for _, logprob in alternatives]
        assert probabilities == sorted(probabilities, reverse=True)
        if tokens[place] in [token for token, _ in alternatives]:
            assert dict(alternatives)[tokens[place]] == pytest.approx(expected[place - 1], abs=1e-4)
    for one in response.sequences:
        assert [len(alternatives) for alternatives in one.topk_logprobs] == [3] * len(one.tokens)


def test_seeds_repeat_and_greedy_is_greedy(service: Any) -> None:
    sampler = taught(service).save_weights_and_get_sampling_client().result()
    start = ids(3, 5)
    assert [one.tokens for one in sample(sampler, start, 3, seed=11)] == [
        one.tokens for one in sample(sampler, start, 3, seed=11)
    ]
    first, second = sample(sampler, start, 2, temperature=0)
    assert first.tokens == second.tokens == sample(sampler, start, top_k=1)[0].tokens


def test_what_stops_a_sample_is_part_of_it(service: Any) -> None:
    sampler = taught(service).save_weights_and_get_sampling_client().result()
    start = ids(3, 5)
    free = sample(sampler, start, temperature=0, max_tokens=12, stop=[])[0]
    assert (len(free.tokens), free.stop_reason) == (12, "length"), "nothing stops it, not even the model's own end"
    at = free.tokens[4]
    stopped = sample(sampler, start, temperature=0, max_tokens=12, stop=[at])[0]
    assert (stopped.tokens, stopped.stop_reason) == (free.tokens[: free.tokens.index(at) + 1], "stop")


def test_each_sampling_client_keeps_its_weights(service: Any, running: Running) -> None:
    """A snapshot does not move when training goes on; an inflight client does. The base is there all the time."""
    client, start = taught(service), ids(4, 6)
    snapshot = client.save_weights_and_get_sampling_client().result()
    inflight = client.save_weights_and_get_sampling_client(kind="inflight").result()
    base = service.create_sampling_client(base_model="calc").result()

    def greedy(sampler: Any) -> list[float]:
        return sampler.compute_logprobs(prompt(start)).result()[1:]

    before = [greedy(one) for one in (snapshot, inflight, base)]
    assert before[0] == pytest.approx(before[1], abs=1e-5)
    assert before[0] != pytest.approx(before[2], abs=1e-3)
    client.forward_backward([datum(ids(5, 10))], "cross_entropy").result()
    client.optim_step(types.AdamParams(learning_rate=1e-2)).result()
    newer = client.save_weights_and_get_sampling_client(kind="inflight").result()
    after = [greedy(one) for one in (snapshot, inflight, base, newer)]
    assert after[0] == pytest.approx(before[0], abs=1e-5)
    assert after[2] == pytest.approx(before[2], abs=1e-5)
    assert after[1] == pytest.approx(after[3], abs=1e-5)
    assert after[1] != pytest.approx(before[1], abs=1e-3)


def test_more_sampling_clients_than_are_loaded_at_once(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were not asked for longest are loaded again from their weights."""
    monkeypatch.setattr("agentlightning.finetuning.tinker.bases.MOST_SAMPLED", 2)
    client, start = training_client(service), ids(6, 6)
    samplers, expected = [], []
    for step in range(4):
        client.forward_backward([datum(ids(step, 10))], "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=3e-3)).result()
        samplers.append(client.save_weights_and_get_sampling_client().result())
        expected.append(client.forward([datum(start)], "cross_entropy").result().loss_fn_outputs[0]["logprobs"])
    for sampler, wanted in [*zip(samplers, expected, strict=True)][::-1]:
        found = sampler.compute_logprobs(prompt(start)).result()[1:]
        np.testing.assert_allclose(found, wanted.to_numpy(), atol=1e-4)


def test_only_the_last_unnamed_weights_stay(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentlightning.finetuning.tinker.service.KEPT_UNNAMED", 2)
    client = training_client(service)
    samplers = [client.save_weights_and_get_sampling_client().result() for _ in range(3)]
    assert len(sample(samplers[-1], ids(1, 4))) == 1
    with pytest.raises(Exception, match="ave them under a name to keep them"):
        sample(samplers[0], ids(1, 4))


def test_the_last_log_probs_of_a_long_prompt(running: Running, service: Any) -> None:
    sampler = service.create_sampling_client(base_model="calc").result()
    tokens = ids(7, 10)
    whole = sampler.compute_logprobs(prompt(tokens)).result()
    response = sampler.sample(
        prompt(tokens),
        num_samples=1,
        sampling_params=types.SamplingParams(max_tokens=1),
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=3,
    ).result()
    assert response.prompt_logprobs[:7] == [None] * 7
    np.testing.assert_allclose(response.prompt_logprobs[7:], whole[7:], atol=1e-5)
    assert all(math.isfinite(one) for one in whole[1:])
