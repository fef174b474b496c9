"""How the answers of model clients are read: what a line probably meant, by it and by Python's words for it."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import LengthFinishReasonError
from openai.types.chat import ChatCompletion, ChatCompletionMessage, ChatCompletionMessageFunctionToolCall
from openai.types.chat.chat_completion import Choice
from openai.types.responses import Response, ResponseOutputMessage

from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.exchange import Refusal
from agentlightning.runner.endings import describe

from .day import said, script

MESSAGE = ChatCompletionMessage(role="assistant", content=None)
ANSWER = ChatCompletion.model_construct(choices=[Choice(finish_reason="stop", index=0, message=MESSAGE)])


async def sleeps() -> None: ...


NAMES: dict[str, Any] = {
    "answer": ANSWER,
    "chunk": Choice.model_construct(delta=MESSAGE),
    "of_responses": Response.model_construct(output=[ResponseOutputMessage.model_construct(content=[])]),
    "blocks": type("Answer", (), {"content": [1]})(),
    "message": MESSAGE,
    "json": json,
    "lock": asyncio.Lock(),
    "nothing": contextlib.nullcontext,
    "tool_call": ChatCompletionMessageFunctionToolCall.model_construct(),
    "arguments": type("Function", (), {"arguments": "{}"})(),
}


@pytest.fixture(scope="module", autouse=True)
def awaitable() -> Iterator[None]:
    coroutine, loop = sleeps(), asyncio.new_event_loop()
    NAMES.update(coroutine=coroutine, future=asyncio.Future(loop=loop))
    yield
    coroutine.close()
    loop.close()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("tool_call.name", "call.function.name"),
        ('json.loads(\'{\\"a\\": \\"b\')', "If max_tokens cut the answer off, raise it"),
        ("'' + chunk.delta.content", "chunk.choices[0].delta.content or ''"),
        ("0.5 + KeyError('q')", "It is the error of a call"),
        ("KeyError('q')['content']", "It is the error of a call"),
        (
            "raise ExceptionGroup('unhandled errors in a TaskGroup', [TypeError('float and \\'coroutine\\'')])",
            "`await` is",
        ),
        ("coroutine > 0.5", "`await` is missing in front of the call that gave this coroutine"),
        ("float(coroutine)", "`await` is missing"),
        ("sum([1, coroutine])", "`await` is missing"),
        ("''.join([coroutine])", "`await` is missing"),
        ("sum(future)", "`await` is missing in front of the call that gave this future"),
        ("with lock: ...", "async with"),
        ("async def f():\n    async with nothing: ...\nf().send(None)", "leave `async` out"),
        ("answer.choices[0].logprobs.content", "logprobs=True"),
        ("answer.choices[0].message.tool_calls[0]", "message.tool_calls or []"),
        ("[*message.tool_calls]", "message.tool_calls or []"),
        ("arguments.arguments['a']", "json.loads(call.function.arguments)"),
        ("blocks.content.text", "answer.content[0].text"),
        ("answer.choices.message", "answer.choices[0].message.content"),
        ("answer.content", "answer.choices[0].message.content"),
        ("answer.choices[0].text", "answer.choices[0].message.content"),
        ("[part.choices for part in answer]", "Without stream=True the answer is whole"),
        ("of_responses.choices", "answer.output_text"),
        ("of_responses.output[0].text", "answer.output_text"),
        ("[chunk][1]", "if chunk.choices: …"),
    ],
)
def test_what_a_line_meant(tmp_path: Path, line: str, words: str) -> None:
    assert words in said_of(tmp_path, line)


@pytest.mark.parametrize("line", ["None.strip()", "[][1]", "int(None)", "{}['arguments']", "message.content.strip()"])
def test_another_line_with_the_same_words(tmp_path: Path, line: str) -> None:
    said = said_of(tmp_path, line)
    assert not any(word in said for word in ("logprobs", "tool_calls", "delta", "chunk", "json.loads", "blocks"))


async def test_coroutines_in_asyncio_wait(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as caught:
        await asyncio.wait([NAMES["coroutine"]])
    assert "await asyncio.gather(*coroutines)" in describe(caught.value)


def test_a_task_in_place_of_its_result(tmp_path: Path) -> None:
    returns = "async def agent(task):\n    return asyncio.create_task(asyncio.sleep(0, 1.0))\n"
    done = script(tmp_path, f"import asyncio\n{returns}agl.Trainer().dev(agl.rollout(agent), [1])\n")
    said(done, "The agent returned a task or a future, and not its result: write return await … there.")


FORGETS = """
import asyncio

async def fails():
    raise ValueError("nobody awaits me")

async def agent(task):
    begun = asyncio.create_task(fails())
    await asyncio.sleep(0.01)
    return 1.0

agl.Trainer().dev(agl.rollout(agent), [1])
"""


def test_what_nobody_awaits_fails_in_a_line(tmp_path: Path) -> None:
    done = script(tmp_path, FORGETS)
    said(done, "What an agent began and did not await failed: ValueError: nobody awaits me", "train.py")
    assert "Traceback" not in done.stderr


def said_of(folder: Path, line: str) -> str:
    (folder / "agent.py").write_text(line)
    with pytest.raises((AttributeError, TypeError, LookupError, ValueError, ExceptionGroup)) as caught:
        exec(compile(line, str(folder / "agent.py"), "exec"), dict(NAMES))
    return describe(caught.value)


def test_an_answer_that_max_tokens_cut_off() -> None:
    assert "max_tokens of the request cut the answer off" in describe(LengthFinishReasonError(completion=ANSWER))


@pytest.mark.parametrize(
    ("dialect", "body", "words"),
    [
        ("chat", {"messages": "Hi"}, "'messages' must be of type list, not 'Hi'. It is [{'role': 'user'"),
        (
            "chat",
            {"messages": [{"finish_reason": "stop", "message": {"role": "assistant"}}]},
            "answer.choices[0].message",
        ),
        ("chat", {"tools": {"type": "function"}}, "It is a list, also of one tool"),
        ("chat", {"logprobs": 5}, "It is true, with top_logprobs"),
        ("chat", {"response_format": {"type": "json_schema", "json_schema": {"type": "object"}}}, "'schema': {…}}}"),
        ("completions", {"prompt": [{"role": "user"}]}, "Messages go to /v1/chat/completions"),
    ],
)
def test_a_field_of_another_kind(dialect: str, body: dict[str, Any], words: str) -> None:
    with pytest.raises(Refusal) as caught:
        next(d for d in DIALECTS if d.name == dialect).parse(
            {"model": "m", "messages": [{"role": "user", "content": "Hi"}], **body}, {}
        )
    assert words in str(caught.value)
