"""A critic that fails is a value: over real HTTP, each way in which one can."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from agentlightning.algorithm.prompts import critic as critics
from agentlightning.algorithm.prompts.critic import CriticAnswer, CriticFailure, HttpCritic, Question, ask
from agentlightning.algorithm.prompts.journal import Journal

QUESTION = Question(model="m", messages=[{"role": "user", "content": "?"}], temperature=0.5, max_tokens=9)


@asynccontextmanager
async def server(*answers: Any) -> AsyncIterator[tuple[HttpCritic, list[Any]]]:
    """Answers in turn, the last one for ever; a number is a status, None is silence."""
    seen: list[Any] = []

    async def complete(request: web.Request) -> web.Response:
        seen.append((await request.json(), request.headers["authorization"]))
        answer = answers[min(len(seen), len(answers)) - 1]
        if answer is None:
            await asyncio.sleep(30)
        return web.Response(status=answer) if isinstance(answer, int) else web.json_response(answer)

    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    critic = HttpCritic(f"http://127.0.0.1:{runner.addresses[0][1]}/v1/", "sk-1")
    try:
        yield critic, seen
    finally:
        await critic.close()
        await runner.cleanup()


def said(message: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"choices": [{"message": message, **more}], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}


async def test_an_answer_with_what_it_used() -> None:
    async with server(said({"content": "yes"})) as (critic, seen):
        assert await ask(critic, QUESTION, 20) == CriticAnswer("yes", 7, 3)
    assert seen == [({**QUESTION.body}, "Bearer sk-1")]


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (said({"content": None, "refusal": "no"}), "refused"),
        (said({"content": "x"}, finish_reason="content_filter"), "refused"),
        (said({"content": "  "}), "empty"),
        ({"choices": []}, "empty"),
        (400, "error"),
    ],
)
async def test_what_cannot_be_used_is_a_failure(answer: Any, kind: str) -> None:
    async with server(answer) as (critic, seen):
        failure = await ask(critic, QUESTION, 20)
    assert isinstance(failure, CriticFailure)
    assert failure.kind == kind
    assert len(seen) == 1


async def test_a_provider_that_is_busy_is_asked_again() -> None:
    async with server(503, 429, said({"content": "yes"})) as (critic, seen):
        assert isinstance(await ask(critic, QUESTION, 20), CriticAnswer)
    assert len(seen) == critics.TRIES


async def test_silence_is_a_timeout() -> None:
    async with server(None) as (critic, _):
        failure = await ask(critic, QUESTION, 0.05)
    assert isinstance(failure, CriticFailure)
    assert failure.kind == "timeout"


def test_a_line_that_was_not_finished_does_not_count(tmp_path: Any) -> None:
    file = tmp_path / "journal.jsonl"
    journal = Journal(file)
    journal.put("a", {"text": "one"})
    journal.close()
    with file.open("a") as torn:
        torn.write('{"key": "b", "te')
    again = Journal(file)
    assert (again.get("a"), again.get("b")) == ({"text": "one"}, None)
    again.put("b", {"text": "two"})
    again.close()
    last = Journal(file)
    last.close()
    assert last.get("b") == {"text": "two"}
