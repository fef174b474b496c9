"""A training server in the test's own event loop, and the official client of the API."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest

from agentlightning.finetuning.app import ServerSettings, TrainingServer
from agentlightning.finetuning.recipe import BaseModel
from agentlightning.finetuning.records import FINISHED

T = TypeVar("T")
FAKE = (sys.executable, "-P", str(Path(__file__).with_name("fake_trainer.py")))
"""Trains nothing, and leaves in the folder what a training would."""


def chats(count: int = 12) -> list[dict[str, Any]]:
    """Sums with answers that the calculator model does not give by itself."""
    asked = [{"role": "user", "content": f"{i} + 1?"} for i in range(count)]
    return [{"messages": [one, {"role": "assistant", "content": "Seven."}]} for one in asked]


def pairs(count: int = 12) -> list[dict[str, Any]]:
    said = ({"role": "assistant", "content": text} for text in ("Seven.", "Nine."))
    good, bad = ([one] for one in said)
    return [
        {"input": {"messages": chat["messages"][:1]}, "preferred_output": good, "non_preferred_output": bad}
        for chat in chats(count)
    ]


def jsonl(rows: Sequence[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


async def upload(client: openai.AsyncOpenAI, rows: Sequence[Any] | bytes) -> str:
    """The id of a file of these lines."""
    content = rows if isinstance(rows, bytes) else jsonl(rows)
    return (await client.files.create(file=("train.jsonl", content), purpose="fine-tune")).id


async def polled(found: Callable[[], Awaitable[T]], good: Callable[[T], bool], seconds: float = 90.0) -> T:
    """What is found, once it is good."""
    async with asyncio.timeout(seconds):
        while not good(value := await found()):  # noqa: ASYNC110 (what a client sees is polled)
            await asyncio.sleep(0.02)
    return value


async def until(client: openai.AsyncOpenAI, job: str, *statuses: str, seconds: float = 90.0) -> Any:
    """The job, once it has one of these states; once it is over, if none is given."""
    wanted = statuses or FINISHED
    return await polled(lambda: client.fine_tuning.jobs.retrieve(job), lambda one: one.status in wanted, seconds)


async def events(client: openai.AsyncOpenAI, job: str) -> list[Any]:
    """The oldest first; no event is there twice, and no step."""
    found = [e async for e in client.fine_tuning.jobs.list_events(job, limit=4)][::-1]
    assert len({e.id for e in found}) == len(found)
    steps: list[Any] = [e.data["step"] for e in found if e.type == "metrics"]  # pyright: ignore
    assert steps == sorted(set(steps))
    return found


Serve = Callable[..., Any]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`async with serve(command=…) as (server, client)`; on the same folder each time."""

    @asynccontextmanager
    async def started(key: str = "any", **settings: Any) -> AsyncIterator[tuple[TrainingServer, openai.AsyncOpenAI]]:
        bases = {name: BaseModel(name, "calc") for name in ("calc", "gpt-4.1-mini")}
        bases["adapted"] = BaseModel("adapted", "calc", {"lora_rank": 4})
        made = ServerSettings(**{"port": 0, "command": FAKE, **settings})
        server = TrainingServer(tmp_path / "served", bases, made)
        await server.start()
        client = openai.AsyncOpenAI(base_url=server.endpoint, api_key=key, max_retries=0)
        try:
            yield server, client
        finally:
            await client.close()
            await server.stop()

    return started
