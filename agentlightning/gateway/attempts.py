"""The attempts the gateway serves right now: whose calls they are, in which mode, with which history.

An attempt is looked up in the store when it is first seen and now and then after; one that is unknown or finished is
refused. Closing an attempt ends its calls and forgets its session. The store, not this table, is the truth about
attempts.

`Turns` shares the event loop out: its work is done in the order in which it came, so an attempt that brings a thousand
short pieces at once would have them all done before anybody else's next one.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from agentlightning.errors import StoreError
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.history.answers import Answered
from agentlightning.gateway.history.memory import Shared
from agentlightning.gateway.history.session import Session
from agentlightning.gateway.prompts import Injected, prompts_in
from agentlightning.gateway.replay import AttemptReplay, replay_in
from agentlightning.rendering.messages import Message
from agentlightning.store.base import LightningStore
from agentlightning.types import (
    FINISHED_ATTEMPT,
    Attempt,
    AttemptedRollout,
    AttemptStatus,
    Rollout,
    RolloutMode,
)
from agentlightning.types.call import LeftOut, Spent
from agentlightning.types.rollout import SAMPLING_SEED

_ENDED = FINISHED_ATTEMPT - {AttemptStatus.UNRESPONSIVE}
"""An attempt whose worker was only slow may go on."""

_RECHECK_SECONDS = 30.0
_MOST_LEFT_OUT = 256
"""Fields that are recorded of one attempt, which may send any number of them."""
_REMEMBERED = 4096
"""How many closed attempts are remembered, to answer late calls and questions about them."""


AT_ONCE = 4
"""Pieces of work of one attempt in each pass of the event loop."""
IN_A_ROW = 64
"""After so many, pieces that have waited without a break are done more slowly, at a pace that leaves others room."""
PAUSE = 0.01
"""Seconds between them from then on, instead of one pass of the event loop."""


class Turns:
    """Lets `AT_ONCE` pieces of work begin in each pass of the event loop; the rest wait, first come, first served."""

    def __init__(self) -> None:
        self._left = AT_ONCE
        self._in_a_row = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        """Return when it is this piece's turn: at once, without a pass of the event loop, unless there are many."""
        loop = asyncio.get_running_loop()
        if self._left and not self._waiting:
            if self._left == AT_ONCE:
                loop.call_soon(self._renew)
            self._left -= 1
            return
        turn = loop.create_future()
        self._waiting.append(turn)
        await turn

    def _renew(self) -> None:
        self._left = AT_ONCE
        while self._left and self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():  # cancelled: its client went away
                turn.set_result(None)
                self._left -= 1
        if self._left == AT_ONCE:
            self._in_a_row = 0
            return
        self._in_a_row += AT_ONCE - self._left
        if self._in_a_row > IN_A_ROW:
            asyncio.get_running_loop().call_later(PAUSE, self._renew)
        else:
            asyncio.get_running_loop().call_soon(self._renew)


class AttemptSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What an attempt did at the gateway."""

    calls: int = 0
    """Responses that were sampled; with n > 1 each choice counts."""
    failed: int = 0
    limit: str | None = None
    """The limit of the run (calls, tokens, the model's context) that a call was refused or cut off at, unless the
    agent went on afterwards: it then ended the attempt. The request's own `max_tokens` is no such limit."""
    infra_error: str | None = None
    """The last failure of a call that was not the agent's."""
    refused: str | None = None
    """Why the gateway itself last refused a call."""
    forwarded: int = 0
    """Answers of other providers."""
    refused_by_provider: str | None = None
    """The last call that another provider refused for good: its key, its model or the request is wrong."""
    lost: str | None = None
    """Why calls that were answered are missing in the store, or may be."""
    rewarded: bool = False
    """Whether a reward came by HTTP."""
    prompt_tokens: int = 0
    response_tokens: int = 0


@dataclass(slots=True, eq=False)
class LiveAttempt:
    """An attempt that is served, as far as the gateway knows it."""

    rollout_id: str
    attempt_id: str
    mode: RolloutMode | None
    new_session: Callable[[str], Session]
    """Makes a session for the policy or engine of this name."""
    checked: float
    used: float
    sampling_seed: int | None = None
    """The rollout's `SAMPLING_SEED`."""
    requests: int = 0
    """Numbers the calls, for seeds."""
    limited_at: int = 0
    """How many requests there had been when one last ran into a limit of the run."""
    summary: AttemptSummary = field(default_factory=AttemptSummary)
    sessions: dict[str, Session] = field(default_factory=dict)
    answered: MutableMapping[str, list[Message]] = field(default_factory=Answered)
    """What stateful requests may refer to: the messages up to and including a response, by its id."""
    running: set[asyncio.Task[Any]] = field(default_factory=set)
    turns: Turns = field(default_factory=Turns)
    """Each request takes one before it is read, and each response before it is sampled and before it is recorded."""
    set_aside: int = 0
    """Tokens that requests which are being answered may still have sampled, where there is a limit."""
    given_back: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when such a request ends."""
    closed: bool = False
    ended: str | None = None
    """Why its open calls were ended, if it was not their clients."""
    spent: dict[str, Spent] = field(default_factory=dict)
    """What it has asked of other providers, by alias."""
    prompts: Sequence[Injected] = ()
    """What is put into its requests."""
    replay: AttemptReplay | None = None
    """What its calls are answered from first."""
    recall: Callable[[str], Awaitable[None]] | None = None
    """Reads a call that left memory, and those that it continues, back from the store."""
    restored: bool = False
    """Whether an earlier gateway served it too."""
    agents: set[str] = field(default_factory=set)
    """The names of the agents that have called."""
    left_out: set[str] = field(default_factory=set)
    """The fields that were left out of its requests, as far as they are recorded."""

    @property
    def key(self) -> Key:
        return self.rollout_id, self.attempt_id

    def session(self, name: str) -> Session:
        """The attempt's history with one policy or engine."""
        found = self.sessions.get(name)
        if found is None:
            found = self.sessions[name] = self.new_session(name)
        return found

    def forget(self) -> None:
        """Let go of what it has in memory; the store has it."""
        for session in self.sessions.values():
            session.memory.clear()
        self.sessions.clear()
        if isinstance(self.answered, Answered):
            self.answered.forget()
        self.answered = Answered()  # the one it had may be another attempt's, too

    def unrecorded(self, left_out: Sequence[LeftOut]) -> tuple[LeftOut, ...]:
        """What no call of the attempt has recorded yet; it counts as recorded from now on."""
        fresh = tuple(one for one in left_out if one.field not in self.left_out)
        fresh = fresh[: max(0, _MOST_LEFT_OUT - len(self.left_out))]
        self.left_out.update(one.field for one in fresh)
        return fresh

    def count(self, **more: int) -> None:
        """Add to the summary's numbers."""
        totals = {name: value + msgspec.structs.asdict(self.summary)[name] for name, value in more.items()}
        self.summary = msgspec.structs.replace(self.summary, **totals)

    def mark_limited(self, limit: str) -> None:
        """A call was refused, or its response cut off, at a limit of the run."""
        self.limited_at = self.requests
        self.summary = msgspec.structs.replace(self.summary, limit=limit)

    def mark_answered(self, number: int) -> None:
        """A request was answered whole: if it came after a limit was hit, that limit did not end the attempt."""
        if self.summary.limit is not None and number >= self.limited_at:
            self.summary = msgspec.structs.replace(self.summary, limit=None)

    def mark_refused(self, why: str) -> None:
        """A call was refused here."""
        self.summary = msgspec.structs.replace(self.summary, failed=self.summary.failed + 1, refused=why)

    def mark_rewarded(self) -> None:
        self.summary = msgspec.structs.replace(self.summary, rewarded=True)

    def mark_refused_by_provider(self, error: str) -> None:
        self.summary = msgspec.structs.replace(self.summary, refused_by_provider=error)

    def mark_infra_error(self, error: str) -> None:
        self.summary = msgspec.structs.replace(self.summary, infra_error=error)

    def mark_lost(self, why: str) -> None:
        self.summary = msgspec.structs.replace(self.summary, lost=why)


Key = tuple[str, str]
Restore = Callable[[LiveAttempt, str | None], Awaitable[None]]
"""Fills an attempt's sessions from the store: with all of its calls, or with one and those that it continues."""


class Attempts:
    """The table of live attempts."""

    def __init__(
        self,
        store: LightningStore,
        new_session: Callable[[str], Session],
        restore: Restore,
        shared: Shared | None = None,
        *,
        idle_seconds: float = 3600.0,
        over_seconds: float = 300.0,
    ) -> None:
        self._store = store
        self._new_session = new_session
        self._restore = restore
        self._shared = shared
        self._idle_seconds = idle_seconds
        self._over_seconds = over_seconds
        self._live: dict[Key, LiveAttempt] = {}
        self._loading: dict[Key, asyncio.Future[LiveAttempt]] = {}
        self._closed: OrderedDict[Key, AttemptSummary] = OrderedDict()
        self._answered: dict[Key, MutableMapping[str, list[Message]]] = {}
        """The answered histories that attempts will find which are not open yet."""

    def goes_on(self, rollout_id: str, attempt_id: str, answered: MutableMapping[str, list[Message]]) -> None:
        """Let the requests of an attempt refer to these answers, and add its own to them."""
        if (rollout_id, attempt_id) not in self._live:
            self._answered[rollout_id, attempt_id] = answered

    async def get(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        """The attempt, ready to be served. Raises `Refusal` if it is unknown or over."""
        key = (rollout_id, attempt_id)
        if key in self._closed:
            raise _over(rollout_id, attempt_id, "finished")
        live = self._live.get(key)
        now = time.monotonic()
        if live is None:
            return await self._load_once(key)
        if now - live.checked > _RECHECK_SECONDS:
            live.checked = now
            await self._look_up(rollout_id, attempt_id)
        live.used = now
        return live

    def summary(self, rollout_id: str, attempt_id: str) -> AttemptSummary:
        key = (rollout_id, attempt_id)
        live = self._live.get(key)
        return live.summary if live is not None else self._closed.get(key, AttemptSummary())

    def mark_lost(self, rollout_id: str, attempt_id: str, why: str) -> None:
        """The store lacks a call of the attempt, and will."""
        key = (rollout_id, attempt_id)
        if (live := self._live.get(key)) is not None:
            live.mark_lost(why)
        elif key in self._closed:
            self._closed[key] = msgspec.structs.replace(self._closed[key], lost=why)

    def open_calls(self, rollout_id: str, attempt_id: str) -> int:
        """Requests of the attempt that are being answered."""
        live = self._live.get((rollout_id, attempt_id))
        return 0 if live is None else len(live.running)

    async def close(self, rollout_id: str, attempt_id: str) -> AttemptSummary:
        """End the attempt's calls (nobody waits for their answers any more) and forget its session."""
        key = (rollout_id, attempt_id)
        self._answered.pop(key, None)
        if key in self._loading:
            await asyncio.wait([self._loading[key]])
        live = self._live.get(key)
        if live is not None:
            live.closed = True
            await _end(live, "the attempt was closed")
            del self._live[key]
            live.forget()
            self._remember(key, live.summary)
        elif key not in self._closed:
            self._remember(key, AttemptSummary())
        return self._closed[key]

    async def end_calls(self, why: str) -> None:
        """End the open calls of all attempts, which are recorded as such; the attempts stay."""
        await asyncio.gather(*[_end(live, why) for live in self._live.values()])

    async def forget_idle(self) -> None:
        """Drop the sessions of attempts nobody has called for long; the store has their calls. Those that are over
        there and were never closed here, because their runner died, are looked for sooner."""
        for key, live in list(self._live.items()):
            now = time.monotonic()
            if live.running or self._live.get(key) is not live:
                continue
            if now - live.used > self._idle_seconds:
                self._live.pop(key, None)
                live.forget()
            elif now - max(live.used, live.checked) > self._over_seconds:
                live.checked = now
                with suppress(StoreError):
                    await self._close_if_over(*key)

    async def _close_if_over(self, rollout_id: str, attempt_id: str) -> None:
        try:
            await self._look_up(rollout_id, attempt_id)
        except Refusal:
            await self.close(rollout_id, attempt_id)

    async def _load_once(self, key: Key) -> LiveAttempt:
        """Several first calls at the same time share one look-up."""
        loading = self._loading.get(key)
        if loading is None:
            loading = self._loading[key] = asyncio.ensure_future(self._load(*key))
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        live = await asyncio.shield(loading)
        if live.closed:
            raise _over(*key, "finished")
        return live

    async def _load(self, rollout_id: str, attempt_id: str) -> LiveAttempt:
        rollout, attempt = await self._look_up(rollout_id, attempt_id)
        now = time.monotonic()
        seed = _sampling_seed(rollout)
        live = LiveAttempt(rollout_id, attempt_id, rollout.mode, self._new_session, now, now, sampling_seed=seed)
        known = self._answered.pop(live.key, None)
        live.answered = Answered(shared=self._shared) if known is None else known
        live.prompts, live.replay = await self._from_resources(rollout.resources_id)
        live.recall = partial(self._restore, live)
        if attempt.status is not AttemptStatus.PREPARING:  # it may have calls from before a restart
            await self._restore(live, None)
        self._live[(rollout_id, attempt_id)] = live
        return live

    async def _from_resources(self, resources_id: str | None) -> tuple[Sequence[Injected], AttemptReplay | None]:
        """The prompts and the recording among a rollout's resources."""
        update = await self._store.get_resources_by_id(resources_id) if resources_id else None
        if update is None:
            return (), None
        return prompts_in(update.resources), await replay_in(update.resources, self._store)

    async def _look_up(self, rollout_id: str, attempt_id: str) -> tuple[AttemptedRollout, Attempt]:
        rollout = await self._store.get_rollout_by_id(rollout_id)
        if rollout is None:
            raise Refusal(
                f"There is no rollout '{rollout_id}' in the store. Take the base URL and the key from the resource "
                "that the "
                "agent is given.",
                status=404,
                code="rollout_not_found",
            )
        if not isinstance(rollout, AttemptedRollout) or rollout.attempt.attempt_id != attempt_id:
            raise _over(rollout_id, attempt_id, "not the latest one of its rollout")
        if rollout.attempt.status in _ENDED:
            raise _over(rollout_id, attempt_id, f"over ({rollout.attempt.status})")
        return rollout, rollout.attempt

    def _remember(self, key: Key, summary: AttemptSummary) -> None:
        self._closed[key] = summary
        while len(self._closed) > _REMEMBERED:
            self._closed.popitem(last=False)


async def _end(live: LiveAttempt, why: str) -> None:
    live.ended = why
    while live.running:
        tasks = list(live.running)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def _sampling_seed(rollout: Rollout) -> int | None:
    """The seed in a rollout's metadata, if there is one; raises Refusal where it is not a whole number."""
    seed = rollout.metadata.get(SAMPLING_SEED)
    if seed is None or (isinstance(seed, int) and not isinstance(seed, bool)):
        return seed
    raise Refusal(f"The rollout's metadata has {SAMPLING_SEED} {seed!r:.80}. Give a whole number.", code="invalid_type")


def _over(rollout_id: str, attempt_id: str, why: str) -> Refusal:
    return Refusal(
        f"Attempt '{attempt_id}' of rollout '{rollout_id}' is {why}; it takes no more model calls. A background task "
        "of the agent that outlives its rollout must be awaited before the agent returns.",
        status=410,
        code="attempt_closed",
    )
