"""A teacher behind an endpoint says the same as one that is loaded beside the policy, over real HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

import agentlightning as agl
from agentlightning.algorithm.parts import teacher
from agentlightning.algorithm.parts.teacher import EndpointTeacher, longest_of
from agentlightning.errors import ConfigError, JudgeError
from agentlightning.types.call import Call

from .test_credit import episode

Score = Callable[[list[int]], list[float]]
"""Ids of a prompt → log-probs of all but the first."""


def of_ids(ids: list[int]) -> list[float]:
    """A number that hangs on the token and on all before it."""
    return [-(sum(ids[:n]) % 7) - ids[n] / 100 for n in range(1, len(ids))]


class Server:
    """Says log-probs of prompts in one of the two ways; `refuses` so many requests first."""

    def __init__(self, how: str, score: Score = of_ids, refuses: int = 0) -> None:
        self._how, self._score, self._refuses = how, score, refuses
        self.asked: list[list[int]] = []
        self.keys: set[str | None] = set()

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.add(request.headers.get("Authorization"))
        if self._refuses:
            self._refuses -= 1
            return web.Response(status=503, text="busy")
        if self._how == "list":
            return web.json_response([body])
        if self._how == "neither":
            return web.json_response({"choices": [{"text": "x"}]})
        ids = body["prompt"]
        if self._how == "prompt_logprobs" and "prompt_logprobs" in body:
            self.asked.append(ids)
            said = [{str(t): {"logprob": p, "rank": 1}} for t, p in zip(ids[1:], self._score(ids), strict=True)]
            return web.json_response({"choices": [{"prompt_logprobs": [None, *said]}]})
        if self._how == "echo" and "prompt_logprobs" in body:
            return web.Response(status=400, text="unknown parameter prompt_logprobs")
        self.asked.append(ids)
        return web.json_response({"choices": [{"logprobs": {"token_logprobs": [None, *self._score(ids), -0.5]}}]})


@asynccontextmanager
async def serving(server: Server) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", server.complete)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    finally:
        await runner.cleanup()


def conversation() -> list[Call]:
    """Two calls, the second of which goes on from the first, and one that has nothing to do with them."""
    one, two, other = episode("g", [], tokens=(2, 3, 2)).calls
    ids = np.array([5, 6, 7, 8], np.int32)
    first = replace(one, prompt_ids=ids, response_ids=np.array([1, 2], np.int32))
    later = np.array([*ids, 1, 2, 9], np.int32)
    return [
        first,
        replace(two, prompt_ids=later, response_ids=np.array([3, 4, 4], np.int32)),
        replace(other, prompt_ids=np.array([8], np.int32), response_ids=np.array([2, 2], np.int32)),
    ]


@pytest.mark.parametrize("how", ["prompt_logprobs", "echo"])
async def test_each_sampled_token_gets_what_the_server_says_of_it(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_TEACHER_KEY", "secret")
    server, calls = Server(how), conversation()
    async with serving(server) as url:
        found = await EndpointTeacher(url, "big").logprobs(calls)
    for call, said in zip(calls, found, strict=True):
        ids = [*call.prompt_ids.tolist(), *call.response_ids.tolist()]
        assert said.tolist() == pytest.approx(of_ids(ids)[len(call.prompt_ids) - 1 :])
    assert len(server.asked) == 2, "what two calls share is asked for once"
    assert server.keys == {"Bearer secret"}


async def test_a_busy_server_is_asked_again_and_one_that_says_nothing_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(Server("echo", refuses=1)) as url:
        assert len(await EndpointTeacher(url, "big").logprobs(conversation())) == 3
    async with serving(Server("neither")) as url:
        with pytest.raises(JudgeError, match="neither by prompt_logprobs nor by echo"):
            await EndpointTeacher(url, "big").logprobs(conversation())
    monkeypatch.setattr(teacher, "TRIES", 1)
    async with serving(Server("list")) as url:
        with pytest.raises(JudgeError, match="no JSON object"):
            await EndpointTeacher(url, "big").logprobs(conversation())
    with pytest.raises(JudgeError, match="404"):
        async with serving(Server("echo")) as url:
            await EndpointTeacher(url + "/elsewhere", "big").logprobs(conversation())


async def test_a_token_that_the_teacher_does_not_know_is_an_error() -> None:
    async with serving(Server("echo", score=lambda ids: [float("-inf")] * (len(ids) - 1))) as url:
        with pytest.raises(ConfigError, match="same tokens"):
            await EndpointTeacher(url, "big").logprobs(conversation())


def test_only_what_begins_nothing_longer_is_asked_for() -> None:
    sequences = [np.array(ids, np.int32) for ids in ([1], [1, 2], [2], [1, 2, 3], [1, 2], [1, 3])]
    assert sorted(longest_of(sequences)) == [2, 3, 5]


async def test_it_says_what_a_loaded_one_says(tiny_model_dir: Path) -> None:
    import torch

    from agentlightning.learner.base import LearnerOptions
    from agentlightning.learner.packing import CreditedCall, pack
    from agentlightning.learner.policy import load_base, load_policy
    from agentlightning.learner.torch_learner import TorchLearner

    model = load_base(str(tiny_model_dir), "float32").eval()

    def score(ids: list[int]) -> list[float]:
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        return logprobs[torch.arange(len(ids) - 1), torch.tensor(ids[1:])].tolist()

    calls = conversation()
    async with serving(Server("prompt_logprobs", score)) as url:
        found = await EndpointTeacher(url, "big").logprobs(calls)
    learner = TorchLearner(load_policy(tiny_model_dir, device="cpu"), LearnerOptions(reference=str(tiny_model_dir)))
    zeros = [np.zeros(len(c.response_ids), np.float32) for c in calls]
    batch = pack([CreditedCall(c, n, 0, z, z) for n, (c, z) in enumerate(zip(calls, zeros, strict=True))])
    np.testing.assert_allclose(np.concatenate(found), learner.forward(batch, reference=True), atol=1e-4)


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"teacher": "big", "teacher_url": "localhost:8000"}, "http://localhost:8000/v1"),
        ({"teacher": "big", "teacher_url": "http://localhost/v1", "temperature": 0.7}, "temperature 1"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused(given: dict[str, Any], cause: str) -> None:
    with pytest.raises(ConfigError, match=cause):
        agl.Distill(model="calc", **given)


def test_nothing_is_loaded_beside_the_policy() -> None:
    algorithm = agl.Distill(model="calc", teacher="big", teacher_url="http://localhost/v1")
    assert algorithm.policy.model.reference is None
