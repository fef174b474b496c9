"""The planner: what a request means before anything is sampled: its prompt, its settings, and whether it is served.

Knows limits, the room that a model's context has, and what to do when there is none.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from agentlightning.engine.base import EngineInfo
from agentlightning.errors import ModelError
from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.exchange import CallRequest, Refusal, unsupported
from agentlightning.gateway.history.session import Session, SessionRequest, Tokens
from agentlightning.gateway.history.tree import MessageKeys, Prompt, path_ids
from agentlightning.gateway.large.requests import LargeRequests
from agentlightning.gateway.recording.records import Place
from agentlightning.gateway.replay import EDITED, EditedMessage
from agentlightning.gateway.routing.models import AttemptLimits
from agentlightning.gateway.sampling.grammars import GrammarCache
from agentlightning.gateway.sampling.settings import Overrides, settle
from agentlightning.gateway.sampling.size import (
    COUNTED,
    LONG,
    MANY,
    Truncation,
    fewest_tokens,
    is_short,
    least_of,
    length_of,
    texts_in,
    texts_of,
    too_long,
)
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message, with_tool_names
from agentlightning.types.arrays import Int32Array, np
from agentlightning.types.finding import counted
from agentlightning.types.recording import RecordedCall


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request with everything known about where it came from."""

    request: CallRequest
    live: LiveAttempt
    place: Place
    response_id: str
    number: int
    """Counts the attempt's requests, from 0."""
    start: float
    edited: tuple[EditedMessage, ...] = ()
    """Messages of the request that its fork has edited."""

    def segment_id(self, part: str) -> str:
        """Names a segment of its prompt. A request may be planned as it came, and then edited."""
        return f"{self.response_id}/{part}{'e' if self.edited else ''}"


class PlannedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was planned: its prompt and how to sample from it."""

    arrival: Arrival
    prompt: Prompt
    prompt_ids: Int32Array
    begun: int
    """How many of them, at the end, the client began the answer with."""
    grammar: str | None
    used: Mapping[str, Any]
    reserved: dict[int, RecordedCall] = {}
    """The recorded answers to choices that have not begun."""
    replayed: dict[int, RecordedCall] = {}
    """The choices that were answered from a recording."""

    def give_back(self) -> None:
        """Give back the recorded answers that no choice has begun with."""
        replay = self.arrival.live.replay
        while replay is not None and self.reserved:
            replay.give_back(self.reserved.popitem()[1])


class Planner:
    """Plans the requests to one engine. `cut_long_prompts`: see `size.Truncation`."""

    def __init__(
        self,
        info: EngineInfo,
        rendering: Rendering,
        large: LargeRequests,
        *,
        policy: str,
        limits: AttemptLimits,
        overrides: Overrides,
        cut_long_prompts: bool,
        trained: bool,
    ) -> None:
        self._info = info
        self._rendering = rendering
        self._large = large
        self._grammars = GrammarCache(rendering, large)
        self._policy = policy
        self._limits = limits
        self._overrides = overrides
        self._cuts = cut_long_prompts
        self._trained = trained

    async def plan(self, arrival: Arrival) -> PlannedRequest:
        """What to sample from, and how; of a fork also which choices its recording answers. Raises `Refusal`.

        A fork's edits are for requests of which no choice is recorded. They leave alone judges and models that are not
        trained.
        """
        replay, request = arrival.live.replay, arrival.request
        if replay is None:
            return await self._planned(arrival)
        edits = replay.edits if self._trained and not arrival.place.judge else None
        if not edits or not replay.over:
            planned = await self._planned(arrival)
            reserved = replay.reserve(self._policy, planned.prompt_ids, planned.used, request.n)
            if reserved or not edits:
                return msgspec.structs.replace(planned, reserved=reserved)
        messages, edited = edits.apply([] if request.prompt is not None else request.messages)
        if edited:
            changed = msgspec.structs.replace(request, messages=messages, size=None, digests=None, measured=False)
            arrival = msgspec.structs.replace(arrival, request=changed, edited=edited)
        return await self._planned(arrival)

    async def _planned(self, arrival: Arrival) -> PlannedRequest:
        """What to sample from, and how. Raises `Refusal`."""
        request, live = arrival.request, arrival.live
        if request.tools and not self._rendering.parses_tools:
            raise Refusal(
                "This model is served without a parser for its tool calls. Start the gateway with the "
                "`renderer` that fits the model.",
                code="tools_unsupported",
                param="tools",
            )
        if request.begun and (request.schema is not None or request.tool_choice.mode == "required"):
            raise unsupported("messages", "an answer that the client began cannot follow a schema, or be a tool call.")
        self._check_limits(arrival)
        cut = None
        try:
            if self._cuts and request.prompt is None:
                request, cut = await self._fit(arrival)
                arrival = msgspec.structs.replace(arrival, request=request)
            self._check_size(request, live, self._info.max_context)
            prompt = await self._prompt(arrival)
        except ModelError as error:
            raise Refusal(str(error), code="invalid_messages", param="messages") from error
        is_first = _note_agent(arrival)
        prompt = _with_cause(prompt, cut=cut is not None, cleared=request.cleared, is_first=is_first)
        rendered = prompt.piece.end
        if request.begun:
            prompt = self._begun(arrival, prompt)
        prompt_ids = path_ids(prompt.piece)
        self._check_length(live, len(prompt_ids))
        return PlannedRequest(
            arrival=arrival,
            prompt=prompt,
            prompt_ids=prompt_ids,
            begun=len(prompt_ids) - rendered,
            grammar=await self._grammars.of(live.key, request, prompt_ids),
            used={
                **self._settle(arrival),
                **({"cut": cut} if cut else {}),
                **({EDITED: msgspec.to_builtins(arrival.edited)} if arrival.edited else {}),
            },
        )

    async def count(self, request: CallRequest, live: LiveAttempt) -> int:
        """How many tokens the prompt of a request has, rendered anew. Raises `Refusal`."""
        most, texts = COUNTED * self._info.max_context, list(texts_of(request))
        self._check_size(request, None, most)
        await self._check_texts(texts, live, most, marks=False)
        try:
            messages = with_tool_names(request.messages)
            rendering = self._rendering.with_arguments(request.arguments)
            if is_short(messages, request.tools):
                return len(rendering.render(messages, request.tools))
            return len(await self._large.render(live.key, rendering, messages, request.tools))
        except ModelError as error:
            raise Refusal(str(error), code="invalid_messages", param="messages") from error

    def _check_size(self, request: CallRequest, live: LiveAttempt | None, most: int) -> None:
        """Refuse a request that its mere length says is too long."""
        self._check_length(live, fewest_tokens(request, self._rendering, lambda: self._least), most)

    @cached_property
    def _least(self) -> int:
        return least_of(self._rendering)

    async def _check_texts(self, texts: Sequence[str], live: LiveAttempt, most: int, *, marks: bool = True) -> None:
        """Refuse texts that are too long, before all of them are tokenised."""
        if await self._exceeds(texts, most, live):
            self._check_length(live if marks else None, most + 1, most)

    async def _exceeds(self, texts: Sequence[str], tokens: int, live: LiveAttempt) -> bool:
        """Whether texts are long, and have certainly more than so many tokens."""
        if length_of(texts) <= LONG:
            return False
        return await self._large.exceeds(live.key, self._rendering, texts, tokens)

    async def _fit(self, arrival: Arrival) -> tuple[CallRequest, Mapping[str, int] | None]:
        """The request, cut if it is too long, and what was cut. One that no cut makes fit stays as it is."""
        request, live, most = arrival.request, arrival.live, self._info.max_context
        session = live.session(self._policy)
        # There is room for the answer; one that has just been cut has room to grow, too, before it is cut again.
        whole = most - min(request.asked.get("max_tokens", most // 16), most // 4)
        grown = whole - most // 16

        question = await self._look_up(session, request, live)
        long = await self._exceeds(_fresh(question), whole, live)
        if not long and await self._length(session, question, live) <= whole:
            return request, None
        forgets = len(request.messages) - len(request.remember or request.messages)
        for messages, cut in Truncation(request.messages):
            changed = msgspec.structs.replace(request, messages=messages, size=None, digests=None)
            question = await self._look_up(session, changed, live)
            if await self._exceeds(_fresh(question), most, live):
                continue
            if await self._length(session, question, live) <= (whole if question.goes_on else grown):
                remember = None if request.remember is None else messages[forgets:]
                return msgspec.structs.replace(changed, remember=remember), cut
        return request, None

    async def _raw(self, prompt: str | list[int], live: LiveAttempt) -> Int32Array:
        """The tokens of a prompt that is no conversation."""
        if isinstance(prompt, str):
            await self._check_texts([prompt], live, self._info.max_context)
            if len(prompt) > LONG:
                return await self._large.encode(live.key, self._rendering, prompt)
            return self._rendering.encode(prompt)
        if max(prompt) >= self._info.vocab_size:
            raise Refusal(
                f"Token {max(prompt)} is not in the vocabulary, which has {self._info.vocab_size} tokens.",
                code="invalid_value",
                param="prompt",
            )
        return np.array(prompt, dtype=np.int32)

    async def _prompt(self, arrival: Arrival) -> Prompt:
        """The request's prompt. Long texts are tokenised elsewhere, so that nobody else waits for them."""
        request, segment_id = arrival.request, arrival.segment_id("p")
        session = arrival.live.session(self._policy)
        if request.prompt is not None:
            return session.plan_tokens(await self._raw(request.prompt, arrival.live), segment_id)
        question = await self._look_up(session, request, arrival.live)
        if arrival.live.restored and session.has_unknown_answer(_written_by_others(arrival)):
            arrival.live.mark_lost("model calls of this attempt were lost with an earlier gateway")
        if question.known is not None:
            return question.known
        if not request.measured:
            await self._check_texts(_fresh(question), arrival.live, self._info.max_context)
        return session.place(question, await self._tokenised(session, question, arrival.live), segment_id)

    def _begun(self, arrival: Arrival, prompt: Prompt) -> Prompt:
        """The prompt with what the client began the answer with."""
        added = self._rendering.begin(path_ids(prompt.piece), arrival.request.begun)
        if added is None:
            name = self._rendering.name
            raise unsupported("messages", f"with the renderer '{name}' an answer cannot be begun for the model.")
        return arrival.live.session(self._policy).begin(prompt, added, arrival.segment_id("b"))

    async def _look_up(self, session: Session, request: CallRequest, live: LiveAttempt) -> SessionRequest:
        """What the session knows of a request, or knew. The keys of many messages are made in pieces."""
        if request.digests is not None:
            keys = MessageKeys.of(request.messages, request.digests)
        else:
            keys = MessageKeys(request.messages)
            for start in range(0, len(request.messages) - MANY, MANY):
                keys.make(start, start + MANY)
                await asyncio.sleep(0)
        question = session.look_up(request.messages, request.tools, keys, request.arguments)
        if question.left is None or live.recall is None:
            return question
        await live.recall(question.left)
        return session.look_up(request.messages, request.tools, keys, request.arguments)

    async def _tokenised(self, session: Session, question: SessionRequest, live: LiveAttempt) -> Tokens:
        """`Session.tokenise`, elsewhere where it takes long."""
        bridging = session.bridging(question)
        if bridging is not None:
            if is_short(bridging.messages, None):
                added = bridging.by(self._rendering)
            else:
                added = await self._large.bridge(live.key, self._rendering, bridging)
            if added is not None:
                return Tokens(added, bridging.after)
        messages = with_tool_names(question.messages)
        rendering = self._rendering.with_arguments(question.arguments)
        if is_short(messages, question.tools):
            return Tokens(rendering.render(messages, question.tools), None)
        return Tokens(await self._large.render(live.key, rendering, messages, question.tools), None)

    async def _length(self, session: Session, question: SessionRequest, live: LiveAttempt) -> int:
        """How many tokens the prompt of a request has, as the session would continue it."""
        if question.known is not None:
            return question.known.piece.end
        made = await self._tokenised(session, question, live)
        return len(made.ids) + (0 if made.after is None else made.after.response.end)

    def _check_length(self, live: LiveAttempt | None, prompt_tokens: int, most: int | None = None) -> None:
        if prompt_tokens < (self._info.max_context if most is None else most):
            return
        if live is not None:
            more = "" if most is None else "at least "
            why = f"A prompt of {more}{prompt_tokens} tokens did not fit the context of {self._info.max_context}."
            live.mark_limited(why)
        raise too_long(prompt_tokens, self._info.max_context, at_least=most is not None)

    def _check_limits(self, arrival: Arrival) -> None:
        live, limits = arrival.live, self._limits
        if limits.calls is not None and arrival.number >= limits.calls:
            why = (
                f"This rollout may make {counted(limits.calls, 'model call')}, and has made "
                f"{'it' if limits.calls == 1 else 'them'}"
            )
            live.mark_limited(f"{why}.")
            raise Refusal(f"{why}. End the rollout with what there is.", code="max_calls_exceeded")
        if limits.tokens is not None and live.summary.response_tokens >= limits.tokens:
            raise self._used_up(live)

    def _used_up(self, live: LiveAttempt) -> Refusal:
        """The refusal of a request for which an attempt has no tokens left."""
        sampled = live.summary.response_tokens
        why = f"This rollout may have {self._limits.tokens} tokens sampled, and has had {sampled}"
        live.mark_limited(f"{why}.")
        return Refusal(f"{why}. End the rollout with what there is.", code="max_tokens_exceeded")

    @asynccontextmanager
    async def share(self, planned: PlannedRequest) -> AsyncIterator[int]:
        """How many tokens each choice may have. They are set aside meanwhile, so that requests of one attempt at the
        same time do not use the same ones; a request for which there are none left waits for the others. Raises
        `Refusal` if nothing is left at all.
        """
        live, n = planned.arrival.live, planned.arrival.request.n
        left_over = self._info.max_context - len(planned.prompt_ids)
        if self._limits.tokens is None:
            yield left_over
            return
        most = planned.used.get("max_tokens")
        wanted = left_over if most is None else min(left_over, max(1, int(most)))
        while (left := self._limits.tokens - live.summary.response_tokens - live.set_aside) < n:
            if not live.set_aside:
                raise self._used_up(live)
            live.given_back.clear()
            await live.given_back.wait()
        each = min(wanted, left // n)
        live.set_aside += each * n
        try:
            yield each
        finally:
            live.set_aside -= each * n
            live.given_back.set()

    def _settle(self, arrival: Arrival) -> Mapping[str, Any]:
        request, live = arrival.request, arrival.live
        used = settle(
            request.asked,
            self._overrides,
            live.mode,
            live.rollout_id,
            arrival.number,
            sampling_seed=live.sampling_seed,
        )
        if request.tools and not request.parallel_tool_calls and request.tool_choice.mode != "required":
            markers = self._rendering.markers
            assert markers is not None, "a request that asks for this has been read without it (`as_served`)"
            assert markers.tool_close is not None
            used["stop_token_ids"] = (*used.get("stop_token_ids", ()), markers.tool_close)
        return used


def _fresh(question: SessionRequest) -> list[str]:
    """The texts of a request that are yet to be tokenised."""
    if question.goes_on:
        return list(texts_in(question.messages[question.walk.turn_depth :], None))
    return list(texts_in(question.messages, question.tools))


def _written_by_others(arrival: Arrival) -> Sequence[Message]:
    """The request's messages but for those that have the text of a fork's edit."""
    replay, messages = arrival.live.replay, arrival.request.messages
    return messages if replay is None else [message for message in messages if not replay.edits.wrote(message)]


def _with_cause(prompt: Prompt, *, cut: bool, cleared: bool, is_first: bool) -> Prompt:
    """The prompt with the known reason why it does not continue what was sampled before."""
    divergence = prompt.divergence
    if divergence is None:
        return prompt
    if cut:
        divergence = replace(divergence, cause="cut_to_fit")
    elif cleared and divergence.cause != "new_conversation":
        divergence = replace(divergence, cause="context_cleared")
    elif is_first:
        divergence = replace(divergence, tokens_lost=0, cause="new_conversation")
    return replace(prompt, divergence=divergence)


def _note_agent(arrival: Arrival) -> bool:
    """Note who calls.

    Returns:
        Whether an agent with a name calls for the first time, after others: what it says is a conversation of its own,
        however alike the agents' prompts are.
    """
    agent, known = arrival.place.agent, arrival.live.agents
    if agent is None or agent in known:
        return False
    known.add(agent)
    return len(known) > 1
