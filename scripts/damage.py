"""Files as a disk or a crash may leave them, for `scripts/fuzz.py`, and all that is read of them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentlightning.store import LightningStore


def damaged(raw: bytes, chance: random.Random) -> bytes:
    """The bytes of a file as a disk or a crash may leave them: cut, with a page of zeros, with bits turned."""
    kind = chance.random()
    if kind < 0.2:
        return raw[: chance.randrange(len(raw) + 1)]
    changed = bytearray(raw)
    if kind < 0.4:
        start = chance.randrange(len(raw) // 512 + 1) * 512
        changed[start : start + 4096] = bytes(len(changed[start : start + 4096]))
    for _ in range(0 if kind < 0.4 else chance.choice((1, 3, 30, 300))):
        at = chance.randrange(len(changed) or 1)
        changed[at : at + chance.choice((1, 1, 4))] = chance.choice(
            (b"", bytes([chance.randrange(256)]), b"\xff" * 4, b"{")
        )
    return bytes(changed)


def read_database(path: Path) -> None:
    """All that a store is asked for; what it refuses is said. Runs in a process of its own."""
    asyncio.run(asyncio.wait_for(read_all(path), 60))


async def read_all(path: Path) -> None:
    """Ask a store for all that it holds, and to take something; what it refuses is said."""
    from agentlightning.errors import AgentLightningError
    from agentlightning.store import SqliteLightningStore

    try:
        store = SqliteLightningStore(path)
    except AgentLightningError as error:
        print("refused", type(error).__name__)
        return
    try:
        await ask_all(store)
        for ask in (store.enqueue_rollout(input=5), store.start_rollout(input={})):
            await _refused(ask)
    finally:
        await _refused(store.close())


async def _refused(ask: Coroutine[Any, Any, Any]) -> tuple[Any, str | None]:
    """What was asked for, or what is said instead. Only our own errors are words; any other one is a finding."""
    from agentlightning.errors import AgentLightningError

    try:
        return await ask, None
    except AgentLightningError as error:
        print("refused", type(error).__name__)
        return None, str(error)


async def ask_all(store: LightningStore, ids: Sequence[str] = ()) -> list[str]:
    """Ask a store for all that it holds, of rollouts that are known if it does not list them; what it refused."""
    found, *refused = await _refused(store.query_rollouts())
    ids = [one.rollout_id for one in found or ()][:20] or ids
    asks = [store.query_calls(ids), store.query_records(ids), store.statistics()]
    asks += [ask(one) for one in ids for ask in (store.query_spans, store.query_attempts, store.get_rollout_by_id)]
    asks += [store.query_runs(), store.query_resources(), store.query_workers(), store.get_latest_resources()]
    asks += [store.query_run_events("run-1")]
    refused += [(await _refused(ask))[1] for ask in asks]
    return [words for words in refused if words is not None]


def read_rendering(path: Path) -> None:
    """What a gateway reads of a model."""
    from agentlightning.errors import AgentLightningError
    from agentlightning.gateway import load_rendering

    try:
        rendering = load_rendering(str(path))
        rendering.decode(rendering.render([{"role": "user", "content": "x"}], None))
    except AgentLightningError as error:
        print("refused", type(error).__name__)


def read_weights(path: Path) -> None:
    """What a learner reads of a model."""
    from agentlightning.errors import AgentLightningError
    from agentlightning.learner.policy import load_policy

    try:
        load_policy(str(path), device="cpu")
    except AgentLightningError as error:
        print("refused", type(error).__name__)


async def make_database(path: Path, engine: Callable[[Any], Any]) -> None:
    """A store with a bit of everything; the engine is made for a rendering."""
    import aiohttp

    from agentlightning.gateway import Gateway, load_rendering
    from agentlightning.models import resolve_model
    from agentlightning.store import SqliteLightningStore
    from agentlightning.types import RolloutStatus, Run

    rendering, store = load_rendering(resolve_model("calc")), SqliteLightningStore(path)
    await store.begin_run(Run(run_id="run-1", algorithm="GRPO", agent="a", settings={}, state={}))
    async with Gateway(store, engine(rendering), rendering) as gateway, aiohttp.ClientSession() as session:
        await store.add_resources({"llm": gateway.as_resource()})
        for number in range(12):
            claimed = await store.start_rollout(input={"number": number}, metadata={"x": "é"})
            ids = claimed.rollout_id, claimed.attempt.attempt_id
            headers = {"authorization": f"Bearer {gateway.key_for(*ids)}"}
            for text in ("one", "two"):
                body = {"model": "policy", "messages": [{"role": "user", "content": text * 40}]}
                url = f"{gateway.as_resource().get_base_url(*ids)}/chat/completions"
                async with session.post(url, json=body, headers=headers) as answer:
                    assert answer.status == 200
            await gateway.close_attempt(*ids)
            if number % 2:
                await store.update_rollout(claimed.rollout_id, status=RolloutStatus.SUCCEEDED)
    await store.close()
