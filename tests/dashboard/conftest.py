"""A served store with a small group of rollouts in it, and a way to ask its dashboard."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.dashboard import served_with_dashboard
from agentlightning.models import resolve_model
from agentlightning.rendering.tokenizer import load_tokenizer
from agentlightning.store import LightningStoreServer, SqliteLightningStore
from agentlightning.types import AttemptStatus, Outcome, RolloutMode, Run, RunEvent, RunEventKind
from agentlightning.types.call import Divergence
from agentlightning.types.names import CALL_ID
from agentlightning.types.reward import reward_attributes
from tests.store.builders import make_call, make_segment, make_span

EVIL = "<script>alert(1)</script>\x1b[31m\u202eevil"
SETTINGS = {"model": "calc", "advantage": "grpo", "credit": "broadcast", "steps": 2, "api_key": "sk-very-secret"}
Ask = Callable[..., Awaitable[Any]]


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqliteLightningStore]:
    store = SqliteLightningStore(tmp_path / "store.db")
    await store.begin_run(Run(run_id="run-1", algorithm="GRPO", agent="agent", settings=SETTINGS))
    said = {"text": "Not learning.", "fix": "More."}
    told: tuple[tuple[RunEventKind, int, dict[str, Any]], ...] = (
        ("step", 0, {"step": 0, "val_reward": 0.25}),
        ("step", 1, {"step": 1, "reward": 0.5}),
        ("verdict", 2, said),
    )
    await store.add_run_events(
        [RunEvent(run_id="run-1", event_id=f"e{n}", kind=k, time=float(n), step=n, data=d) for k, n, d in told]
    )
    await add_rollout(store, "good", [7, 8], 1.0)
    await add_rollout(store, "bad", [7, 9], 0.0)
    yield store
    await store.close()


async def add_rollout(
    store: SqliteLightningStore, rollout_id: str, sampled: list[int], reward: float, *, said: str | None = None
) -> None:
    """A rollout of one call that sampled these tokens, which say its id, or `said`."""
    claim = await store.start_rollout(
        {"question": EVIL},
        RolloutMode.TRAIN,
        metadata={"step": 1, "group": "1-0"},
        worker_id="w",
        rollout_id=rollout_id,
        run_id="run-1",
    )
    first = make_call(
        claim, f"{rollout_id}-1", "p", "r", make_segment("p", None, 0, [1, 2]), make_segment("r", "p", 2, sampled, 3)
    )
    spoken = {
        CALL_ID: f"{rollout_id}-1",
        "gen_ai.input.messages": '[{"role": "user", "parts": [{"type": "text", "content": "hello"}]}]',
        "gen_ai.output.messages": json.dumps(
            [{"role": "assistant", "parts": [{"type": "text", "content": said or rollout_id}]}]
        ),
    }
    await store.add_calls([dataclasses.replace(first, span=make_span(claim, "chat policy", **spoken))])
    await store.add_span(make_span(claim, "reward", **reward_attributes(reward)))
    await store.update_attempt(
        claim.rollout_id, claim.attempt.attempt_id, status=AttemptStatus.SUCCEEDED, outcome=Outcome.OK
    )


async def add_broken_rollout(store: SqliteLightningStore) -> int:
    """A rollout `broke` whose second call, `c2`, has another time in its prompt; returns where they differ."""
    tokenizer = load_tokenizer(resolve_model("calc"))
    begins, was, now = (tokenizer.encode(text) for text in ("user: it is 10:31:0", "7 now", "9 now"))
    claim = await store.start_rollout("x", RolloutMode.TRAIN, worker_id="w", rollout_id="broke", run_id="run-1")
    prompts = make_segment("p1", None, 0, [*begins, *was]), make_segment("p2", "p1", len(begins), now)
    sampled = make_segment("r1", "p1", len(begins + was), [7], 3), make_segment("r2", "p2", len(now), [8], 3)
    first, second = (make_call(claim, f"c{n}", f"p{n}", f"r{n}", prompts[n - 1], sampled[n - 1]) for n in (1, 2))
    left = Divergence(len(begins), 9, "system_prompt_changed")
    info = dataclasses.replace(second.info, divergence=left, start_time=3.0)
    spans = [make_span(claim, "chat policy", **{CALL_ID: f"c{n}"}) for n in (1, 2)]
    await store.add_calls(
        [dataclasses.replace(first, span=spans[0]), dataclasses.replace(second, info=info, span=spans[1])]
    )
    return len(begins)


@pytest.fixture
async def server(store: SqliteLightningStore) -> AsyncIterator[LightningStoreServer]:
    server = served_with_dashboard(store, port=0, admin_key="the-key")
    await server.start()
    yield server
    await server.stop()


@pytest.fixture
async def ask(server: LightningStoreServer) -> AsyncIterator[Ask]:
    """GET a path of the dashboard's API as JSON."""
    async with aiohttp.ClientSession() as session:

        async def get(path: str, status: int = 200, **options: Any) -> Any:
            async with session.get(f"{server.endpoint}/dashboard/api{path}", **options) as response:
                assert response.status == status, await response.text()
                return await response.json()

        yield get


async def send(session: aiohttp.ClientSession, method: str, url: str, **options: Any) -> tuple[int, Any, str]:
    """The status, headers and text of an answer, read to its end."""
    async with session.request(method, url, **options) as response:
        return response.status, response.headers, await response.text()
