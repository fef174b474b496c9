"""The embedded engine against an ordinary forward of the same model: exact under everything that goes on at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from agentlightning.engine.base import Chunk, SamplingParams
from agentlightning.engine.events import Ended, Event, Failed, Request
from agentlightning.errors import ConfigError, EngineError, ModelError
from agentlightning.learner.policy import Policy

from .conftest import collect, concat, drain, gap, make_engine, random_ids, reference, request, run

EXACT = 2e-5
"""Largest difference of log-probs in fp32."""


def embedding(policy: Policy) -> torch.Tensor:
    weight = policy.model.get_input_embeddings().weight
    assert isinstance(weight, torch.Tensor)
    return weight


def mixed_requests(count: int, seed: int) -> list[Request]:
    """Requests of many lengths and settings, most with one of two long common prefixes."""
    rng = np.random.default_rng(seed)
    prefixes = [random_ids(40, 1), random_ids(60, 2), random_ids(0, 3)]
    requests: list[Request] = []
    for number in range(count):
        prompt = np.concatenate([prefixes[rng.integers(3)], random_ids(int(rng.integers(1, 50)), seed + number)])
        params = SamplingParams(
            max_tokens=int(rng.integers(1, 40)),
            temperature=float(rng.choice([0.0, 0.6, 1.0, 1.5])),
            top_p=float(rng.choice([1.0, 0.8])),
            top_k=int(rng.choice([0, 0, 20])),
        )
        requests.append(Request(request_id=number, prompt_ids=prompt, params=params, stream=bool(number % 3 == 0)))
    return requests


@pytest.mark.parametrize("settings", [{"max_concurrency": 6}, {"max_concurrency": 6, "prefill_tokens": 24}])
def test_exact_while_requests_join_leave_and_abort(policy: Policy, settings: dict[str, int]) -> None:
    engine = make_engine(policy, max_context=160, **settings)
    requests = mixed_requests(40, seed=100)
    aborted = {5, 11, 12, 30}
    parts: dict[int, list[Chunk]] = {}
    arriving = list(requests)
    rng = np.random.default_rng(7)
    while arriving or engine.active:
        for new in arriving[: int(rng.integers(0, 4))]:
            engine.submit(new)
            arriving.remove(new)
        collect(engine.step(), parts)
        if len(parts) > 10:
            for request_id in aborted:
                engine.abort(request_id)
    responses = {request_id: concat(chunks) for request_id, chunks in parts.items() if chunks[-1].finish_reason}
    assert set(responses) >= {r.request_id for r in requests} - aborted
    for one in requests:
        if one.request_id in responses:
            assert gap(policy, one, responses[one.request_id]) < EXACT, one
    assert engine.counters.cached > 500


def test_the_comparison_notices_stale_keys_and_values(policy: Policy) -> None:
    """Negative control: with the weights changed behind the engine's back, cached prefixes give wrong log-probs."""
    engine = make_engine(policy)
    prompt = random_ids(30, 1)
    first = run(engine, [request(0, prompt)])[0]
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.mul_(1.05)
    longer = request(1, np.concatenate([prompt, first.ids, random_ids(3, 2)]))
    stale = run(engine, [longer])[1]
    assert stale.cached_tokens > 30
    assert gap(policy, longer, stale) > 100 * EXACT
    engine.weights_changed(1)
    fresh = run(engine, [longer])[1]
    assert (fresh.cached_tokens, fresh.version) == (0, 1)
    assert gap(policy, longer, fresh) < EXACT


def test_drained_requests_are_of_one_version(policy: Policy) -> None:
    engine = make_engine(policy, max_concurrency=1)
    engine.submit(request(0, random_ids(5, 0), max_tokens=3, temperature=0))
    engine.submit(request(1, random_ids(5, 1), max_tokens=3, temperature=0))
    while engine.running or engine.waiting == 2:
        engine.step(admit=engine.waiting == 2)
    assert engine.weights_changed(1) == []
    assert engine.waiting == 1
    assert drain(engine)[1].version == 1


@pytest.mark.parametrize("stream", [False, True])
def test_running_requests_go_on_under_new_weights(policy: Policy, stream: bool) -> None:
    """Every token's log-prob is that of an ordinary forward over the whole context with the weights of its version."""
    engine = make_engine(policy, max_concurrency=4)
    requests = [request(n, random_ids(6 + 20 * n, n), max_tokens=24, stream=stream) for n in range(6)]
    parts: dict[int, list[Chunk]] = {}
    for one in requests:
        engine.submit(one)
    weights = [{name: tensor.clone() for name, tensor in policy.model.state_dict().items()}]
    for version in (1, 2):
        for _ in range(7):
            collect(engine.step(), parts)
        with torch.no_grad():
            for parameter in policy.model.parameters():
                parameter.mul_(1.1)
        weights.append({name: tensor.clone() for name, tensor in policy.model.state_dict().items()})
        collect(engine.weights_changed(version), parts)
    while engine.active:
        collect(engine.step(), parts)
    versions = {n: np.concatenate([np.full(len(c.ids), c.version) for c in chunks]) for n, chunks in parts.items()}
    assert {tuple(np.unique(found)) for found in versions.values()} == {(0, 1, 2), (2,)}, "some were waiting"
    whole = {n: concat(chunks) for n, chunks in parts.items()}
    assert all(len(chunk.ids) == 24 for chunk in whole.values())
    for version, state in enumerate(weights):
        policy.model.load_state_dict(state)
        for one in requests:
            chunk, mine = whole[one.request_id], versions[one.request_id] == version
            expected = reference(policy, one.prompt_ids, chunk.ids)
            assert np.abs(expected - chunk.plain_logprobs)[mine].max(initial=0) < EXACT


def test_the_next_turn_reuses_the_whole_last_one_in_place(policy: Policy) -> None:
    engine = make_engine(policy, max_concurrency=4)
    history = random_ids(30, 1)
    for turn in range(4):
        one = request(turn, history, max_tokens=10, temperature=1.0)
        response = run(engine, [one])[turn]
        assert gap(policy, one, response) < EXACT
        if turn:
            # All but the last sampled token, whose keys and values were never needed, and the new message.
            assert response.cached_tokens == len(history) - 6
        history = np.concatenate([history, response.ids, random_ids(5, 100 + turn)])


def test_siblings_wait_for_the_prefix_that_one_of_them_computes(policy: Policy) -> None:
    engine = make_engine(policy, max_concurrency=8)
    prompt = random_ids(64, 1)
    responses = run(engine, [request(i, prompt, max_tokens=5) for i in range(8)])
    assert sorted(r.cached_tokens for r in responses.values()) == [0] + [63] * 7
    assert engine.counters.prefilled == 64


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # peft asks transformers for it
def test_lora_counts(lora_policy: Policy) -> None:
    engine = make_engine(lora_policy)
    requests = mixed_requests(6, seed=3)
    responses = run(engine, requests)
    assert max(gap(lora_policy, r, responses[r.request_id]) for r in requests) < EXACT
    with lora_policy.peft.disable_adapter():
        assert min(gap(lora_policy, r, responses[r.request_id]) for r in requests) > 10 * EXACT


def test_a_seed_fixes_the_response_whatever_else_runs(policy: Policy) -> None:
    seeded = request(0, random_ids(20, 1), max_tokens=40, seed=1234, temperature=1.0)
    alone = run(make_engine(policy), [seeded])[0]
    crowd = [request(i, random_ids(int(5 + i), i), max_tokens=60, temperature=1.2) for i in range(1, 12)]
    engine = make_engine(policy, seed=99)
    for one in crowd[:6]:
        engine.submit(one)
    for _ in range(5):
        engine.step()
    among_others = run(engine, [*crowd[6:], seeded])[0]
    assert alone.ids.tolist() == among_others.ids.tolist()
    np.testing.assert_allclose(alone.plain_logprobs, among_others.plain_logprobs, atol=EXACT)
    other_seed = request(0, seeded.prompt_ids, max_tokens=40, seed=-5, temperature=1.0)
    assert run(make_engine(policy), [other_seed])[0].ids.tolist() != alone.ids.tolist()


def test_greedy_takes_the_most_probable_token(policy: Policy) -> None:
    one = request(0, random_ids(10, 4), temperature=0, max_tokens=12, top_logprobs=3)
    response = run(make_engine(policy), [one])[0]
    assert response.top_ids is not None
    assert response.top_logprobs is not None
    assert response.top_ids.shape == (len(response.ids), 3)
    assert response.top_ids[:, 0].tolist() == response.ids.tolist()
    assert response.top_logprobs[:, 0].tolist() == response.plain_logprobs.tolist()
    assert (np.diff(response.top_logprobs, axis=1) <= 0).all()
    assert not response.logprobs.any()
    assert gap(policy, one, response) < EXACT


def test_a_stream_is_the_same_response_token_by_token(policy: Policy) -> None:
    prompts = [random_ids(10, s) for s in range(4)]
    whole = run(make_engine(policy), [request(i, p, seed=i, top_logprobs=i % 2) for i, p in enumerate(prompts)])
    engine = make_engine(policy)
    for number, prompt in enumerate(prompts):
        engine.submit(request(number, prompt, seed=number, top_logprobs=number % 2, stream=True))
    sizes: list[int] = []

    def note(events: list[Event]) -> None:
        sizes.extend(len(e.chunk.ids) for e in events if isinstance(e, Ended))

    streamed = drain(engine, note)
    assert sizes == [1] * 4
    for number, response in whole.items():
        assert streamed[number].ids.tolist() == response.ids.tolist()
        np.testing.assert_array_equal(streamed[number].logprobs, response.logprobs)
        assert streamed[number].finish_reason == response.finish_reason
        if number % 2:
            assert response.top_ids is not None
            np.testing.assert_array_equal(streamed[number].top_ids, response.top_ids)  # pyright: ignore[reportArgumentType]


def test_reasons_to_finish(policy: Policy) -> None:
    engine = make_engine(policy, max_context=64)
    free = run(engine, [request(0, random_ids(10, 8), temperature=0, max_tokens=None)])[0]
    assert (free.finish_reason, len(free.ids)) == ("length", 54) or free.ids[-1] in policy.eos_ids
    stop_id = int(free.ids[4])
    first = free.ids.tolist().index(stop_id)
    stopped = run(engine, [request(1, random_ids(10, 8), temperature=0, stop_token_ids=(stop_id,))])[1]
    assert (stopped.finish_reason, stopped.ids.tolist()) == ("stop", free.ids[: first + 1].tolist())
    short = run(engine, [request(2, random_ids(10, 8), temperature=0, max_tokens=1)])[2]
    assert (short.finish_reason, len(short.ids)) == ("length", 1)


def test_the_end_token_ends(policy: Policy) -> None:
    end = policy.eos_ids[0]
    with torch.no_grad():
        embedding(policy)[end].mul_(6)  # tied: its logit is far from the others'
    chunks = run(make_engine(policy), [request(i, random_ids(10, i), max_tokens=100) for i in range(20)])
    ended = [c for c in chunks.values() if c.ids[-1] == end]
    assert ended
    assert all(c.finish_reason == "stop" and end not in c.ids[:-1] for c in ended)


def test_the_end_comes_after_the_fewest_tokens_or_not_at_all(policy: Policy) -> None:
    end = policy.eos_ids[0]
    with torch.no_grad():
        embedding(policy)[end].mul_(6)
    asked = [random_ids(10, i) for i in range(20)]
    free = run(make_engine(policy), [request(i, p, max_tokens=60) for i, p in enumerate(asked)])
    early = [i for i, chunk in free.items() if len(chunk.ids) < 9 and chunk.finish_reason == "stop"]
    assert early, "or this test shows nothing"
    least = run(make_engine(policy), [request(i, asked[i], max_tokens=60, min_tokens=9) for i in early])
    assert all(end not in chunk.ids[:8] and len(chunk.ids) >= 9 for chunk in least.values())
    assert any(chunk.finish_reason == "stop" for chunk in least.values())
    deaf = run(make_engine(policy), [request(i, asked[i], max_tokens=60, ignore_eos=True) for i in early])
    assert all((chunk.finish_reason, len(chunk.ids)) == ("length", 60) for chunk in deaf.values())
    assert all(end in chunk.ids for chunk in deaf.values())
    mixed = run(make_engine(policy), [request(i, asked[i], max_tokens=60, ignore_eos=i % 2 == 0) for i in early])
    assert all((chunk.finish_reason == "length") == (i % 2 == 0) for i, chunk in mixed.items() if i in early)


def test_a_stop_string_ends_with_the_token_that_completes_it(policy: Policy) -> None:
    tokenizer = policy.tokenizer
    free = run(make_engine(policy), [request(0, random_ids(10, 8), temperature=0, max_tokens=30)])[0]
    text = [str(tokenizer.decode(free.ids[:n].tolist())) for n in range(31)]
    stop = text[30][8:11]
    cut = next(n for n in range(31) if stop in text[n])
    chunk = run(make_engine(policy), [request(0, random_ids(10, 8), temperature=0, stop=("never", stop))])[0]
    assert (chunk.finish_reason, chunk.stop_string) == ("stop", stop)
    assert chunk.ids.tolist() == free.ids[:cut].tolist()


def test_an_aborted_request_says_nothing_more_and_frees_its_slot(policy: Policy) -> None:
    engine = make_engine(policy, max_concurrency=1)
    engine.submit(request(0, random_ids(10, 1), max_tokens=400))
    engine.submit(request(1, random_ids(10, 2), max_tokens=400))
    engine.submit(request(2, random_ids(10, 3), max_tokens=5))
    engine.step()
    engine.abort(0)
    engine.abort(1)
    engine.abort(77)
    assert list(drain(engine)) == [2]
    assert not engine.active


def test_diverged_weights_fail_the_request_and_leave_no_trace(policy: Policy) -> None:
    engine = make_engine(policy, max_concurrency=2)
    weight = embedding(policy)
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    engine.submit(request(0, random_ids(10, 1)))
    (failed,) = engine.step()
    assert isinstance(failed, Failed)
    assert "diverged" in failed.message
    with torch.no_grad():
        weight.copy_(kept)
    engine.weights_changed(1)
    requests = [request(i, random_ids(5 + 9 * i, i)) for i in range(1, 5)]
    responses = run(engine, requests)
    assert max(gap(policy, r, responses[r.request_id]) for r in requests) < EXACT


def test_requests_that_can_never_be_sampled_are_refused(policy: Policy) -> None:
    engine = make_engine(policy, max_context=64)
    with pytest.raises(ModelError, match="64 tokens, but the context ends at 64"):
        engine.submit(request(0, random_ids(64, 1)))
    with pytest.raises(ModelError, match="empty"):
        engine.submit(request(0, random_ids(0, 1)))
    with pytest.raises(ModelError, match="token id 300"):
        engine.submit(request(0, np.array([1, 300], dtype=np.int32)))
    for name, wrong in {"temperature": -1, "top_p": 0.0, "top_k": -2, "max_tokens": 0, "stop": ("",)}.items():
        with pytest.raises(ConfigError, match=name):
            engine.submit(request(0, random_ids(4, 1), **{name: wrong}))  # pyright: ignore[reportArgumentType]
    engine.submit(request(0, random_ids(4, 1)))
    with pytest.raises(EngineError, match="another id"):
        engine.submit(request(0, random_ids(4, 1)))


@pytest.mark.parametrize("wrong", [{"max_context": 8}, {"max_concurrency": 0}, {"prefill_tokens": 1}])
def test_sizes_that_cannot_work_are_refused(policy: Policy, wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        make_engine(policy, **wrong)


def test_an_end_token_outside_the_vocabulary_is_refused(policy: Policy) -> None:
    policy.eos_ids = (5, 300)
    with pytest.raises(ModelError, match=r"\[300\] are outside"):
        make_engine(policy)


def test_broken_weights_are_refused(policy: Policy) -> None:
    with torch.no_grad():
        embedding(policy)[3] = float("nan")
    with pytest.raises(ModelError, match="not finite"):
        make_engine(policy)


def test_after_a_failed_step_the_engine_goes_on(policy: Policy) -> None:
    class Fragile(type(policy.model)):
        broken = False

        def forward(self, *args: object, **kwargs: object) -> object:
            if self.broken:
                raise RuntimeError("out of memory")
            return super().forward(*args, **kwargs)

    policy.model.__class__ = Fragile
    engine = make_engine(policy, max_concurrency=2)
    for number in range(5):
        engine.submit(request(number, random_ids(9, number), max_tokens=50))
    engine.step()
    Fragile.broken = True
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.step()
    Fragile.broken = False
    assert sorted(engine.abort_all()) == [0, 1, 2, 3, 4]
    assert not engine.active
    one = request(9, random_ids(20, 9))
    assert gap(policy, one, run(engine, [one])[9]) < EXACT


def test_a_budget_of_less_than_one_context_is_refused(policy: Policy) -> None:
    with pytest.raises(ConfigError, match="Lower max_context"):
        make_engine(policy, max_context=99, kv_budget_bytes=1000)


def test_penalties_and_bias_hold_in_a_batch(policy: Policy) -> None:
    """A bias keeps a token out, a penalty keeps tokens from coming again, and neighbours see nothing of either."""
    engine, prompt = make_engine(policy), random_ids(12, 5)

    def asking(number: int, **settings: Any) -> Request:
        return Request(request_id=number, prompt_ids=prompt, params=SamplingParams(max_tokens=24, seed=4, **settings))

    alone = run(make_engine(policy), [asking(0)])[0]
    banned = int(alone.ids[0])
    penalties = {"presence_penalty": 2.0, "frequency_penalty": 2.0, "temperature": 0.0}
    requests = [
        asking(0),
        asking(1, logit_bias={banned: -100.0}),
        asking(2, logit_bias={7: 100.0}),
        asking(3, logit_bias={7: 4.0}, **penalties),
    ]
    found = run(engine, requests)
    assert found[0].ids.tolist() == alone.ids.tolist()
    assert banned not in found[1].ids
    assert set(found[2].ids.tolist()) == {7}
    assert (found[2].logprobs > -1e-4).all(), "it was all but certain"
    assert (found[2].plain_logprobs < -0.1).all(), "which the policy was not"
    assert np.bincount(found[3].ids).max() <= 4
    with pytest.raises(ConfigError, match="outside the model's vocabulary"):
        engine.submit(asking(9, logit_bias={10**6: 1.0}))
