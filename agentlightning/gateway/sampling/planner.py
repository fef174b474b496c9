"""The planner: what a request means before anything is sampled: its prompt, its settings, and whether it is served.

Knows limits, the room that a model's context has, and what to do when there is none.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import msgspec

from agentlightning.engine.base import EngineInfo
from agentlightning.errors import ModelError
from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.exchange import CallRequest, Refusal, unsupported
from agentlightning.gateway.history.session import Keys, Prompt, Question, Session, path_ids
from agentlightning.gateway.history.truncation import Truncation
from agentlightning.gateway.limits import in_background
from agentlightning.gateway.recording.records import Place
from agentlightning.gateway.routing.models import AttemptLimits
from agentlightning.gateway.sampling.settings import Overrides, settle
from agentlightning.rendering import Message, Rendering, Tool
from agentlightning.rendering.messages import with_tool_names
from agentlightning.types.arrays import Int32Array, np

_LONG = 20_000
"""Characters of a request from which on it is tokenised beside the event loop."""
_GROWN = 50_000
"""The same for a conversation that goes on, of which only what is new is tokenised."""
_MANY = 200
"""Messages of a request from which on they are handled beside the event loop."""
_COUNTED = 4
"""Prompts of so many contexts are still counted, so that an agent knows how much to leave out."""


class Arrival(msgspec.Struct, frozen=True, kw_only=True):
    """A request with everything known about where it came from."""

    request: CallRequest
    live: LiveAttempt
    place: Place
    response_id: str
    number: int
    """Counts the attempt's requests, from 0."""
    start: float


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was planned: its prompt and how to sample from it."""

    arrival: Arrival
    prompt: Prompt
    prompt_ids: Int32Array
    grammar: str | None
    used: Mapping[str, Any]


class Planner:
    """Plans the requests to one engine. `cut_long_prompts`: see `history.truncation`."""

    def __init__(
        self,
        info: EngineInfo,
        rendering: Rendering,
        *,
        policy: str,
        limits: AttemptLimits,
        overrides: Overrides,
        cut_long_prompts: bool,
    ) -> None:
        self._info = info
        self._rendering = rendering
        self._policy = policy
        self._limits = limits
        self._overrides = overrides
        self._cuts = cut_long_prompts

    async def plan(self, arrival: Arrival) -> Asked:
        """What to sample from, and how. Raises `Refusal`."""
        request, live = arrival.request, arrival.live
        if request.tools and not self._rendering.parses_tools:
            raise Refusal(
                "This model is served without a parser for its tool calls. Start the gateway with the "
                "`renderer` that fits the model.",
                code="tools_unsupported",
                param="tools",
            )
        if request.prefilled:
            raise unsupported(
                "messages", "the last one is the assistant's, and an answer cannot be begun for the model."
            )
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
        if cut and prompt.divergence is not None:
            prompt = replace(prompt, divergence=replace(prompt.divergence, cause="cut_to_fit"))
        prompt_ids = path_ids(prompt.piece)
        self._check_room(live, len(prompt_ids))
        return Asked(
            arrival=arrival,
            prompt=prompt,
            prompt_ids=prompt_ids,
            grammar=self._grammar(request, prompt_ids),
            used={**self._settle(arrival), **({"cut": cut} if cut else {})},
        )

    async def count(self, request: CallRequest) -> int:
        """How many tokens the prompt of a request has, rendered anew. Raises `Refusal`."""
        most, texts = _COUNTED * self._info.max_context, list(_texts(request.messages, request.tools))
        self._check_size(request, None, most)
        await self._check_texts(texts, None, most)
        try:
            messages = with_tool_names(request.messages)
            if _length_of(texts) <= _LONG and len(messages) <= _MANY:
                return len(self._rendering.render(messages, request.tools))
            return len(await in_background(self._rendering.render, messages, request.tools))
        except ModelError as error:
            raise Refusal(str(error), code="invalid_messages", param="messages") from error

    def _check_size(self, request: CallRequest, live: LiveAttempt | None, most: int) -> None:
        """Refuse a request that its mere length says is too long."""
        if len(request.messages) > _MANY:
            said = sum(bool(m["content"] or m.get("tool_calls")) for m in request.messages)
            self._check_room(live, said * self._least, most)
        self._check_room(live, _size(request) // self._rendering.longest_token, most)

    @cached_property
    def _least(self) -> int:
        """How many tokens a message has at least, beside what it says, in the model's format."""
        user: Message = {"role": "user", "content": "x"}
        answer: Message = {"role": "assistant", "content": "x"}
        alone = len(self._rendering.render([user], None))
        added: list[int] = []
        for some in ([user] * 8, [answer, user] * 4):
            with suppress(ModelError):  # a template may want the roles to alternate
                added.append(len(self._rendering.render([user, *some], None)) - alone)
        return max(1, min(added, default=0) // 8 - 1)

    async def _check_texts(self, texts: Sequence[str], live: LiveAttempt | None, most: int) -> None:
        """Refuse texts that are too long, before all of them are tokenised."""
        if await self._exceeds(texts, most):
            self._check_room(live, most + 1, most)

    async def _exceeds(self, texts: Sequence[str], tokens: int) -> bool:
        """Whether texts are long, and have certainly more than so many tokens."""
        if _length_of(texts) <= _LONG:
            return False
        gone = threading.Event()
        try:
            return await in_background(self._rendering.exceeds, texts, tokens, gone.is_set)
        finally:
            gone.set()  # nobody waits any more

    async def _fit(self, arrival: Arrival) -> tuple[CallRequest, Mapping[str, int] | None]:
        """The request, cut if it is too long, and what was cut. One that no cut makes fit stays as it is."""
        request, most = arrival.request, self._info.max_context
        session = arrival.live.session(self._policy)

        question = session.look_up(request.messages, request.tools)
        if not await self._exceeds(_fresh(question), most) and await _length(session, question) < most:
            return request, None
        # A conversation that has just been cut has room to be answered, and to grow; one that goes on may use it.
        room = min(request.asked.get("max_tokens", most // 8), most // 4)
        forgets = len(request.messages) - len(request.remember or request.messages)
        for messages, cut in Truncation(request.messages):
            question = session.look_up(messages, request.tools)
            if await self._exceeds(_fresh(question), most):
                continue
            if await _length(session, question) <= (most - 1 if question.goes_on else most - room):
                remember = None if request.remember is None else messages[forgets:]
                return msgspec.structs.replace(request, messages=messages, remember=remember), cut
        return request, None

    async def _raw(self, prompt: str | list[int], live: LiveAttempt) -> Int32Array:
        """The tokens of a prompt that is no conversation."""
        if isinstance(prompt, str):
            await self._check_texts([prompt], live, self._info.max_context)
            encode = self._rendering.encode
            return await in_background(encode, prompt) if len(prompt) > _LONG else encode(prompt)
        if max(prompt) >= self._info.vocab_size:
            raise Refusal(
                f"Token {max(prompt)} is not in the vocabulary, which has {self._info.vocab_size} tokens.",
                code="invalid_value",
                param="prompt",
            )
        return np.array(prompt, dtype=np.int32)

    async def _prompt(self, arrival: Arrival) -> Prompt:
        """The request's prompt. Long texts are tokenised in a thread, so that nobody else waits for them."""
        request, segment_id = arrival.request, f"{arrival.response_id}/p"
        session = arrival.live.session(self._policy)
        if request.prompt is not None:
            return session.plan_tokens(await self._raw(request.prompt, arrival.live), segment_id)
        many = len(request.messages) > _MANY or _size(request) > _GROWN
        keys = await in_background(Keys.made, request.messages) if many else None
        question = session.look_up(request.messages, request.tools, keys)
        if arrival.live.restored and session.has_unknown_answer(request.messages):
            arrival.live.mark_lost("model calls of this attempt were lost with an earlier gateway")
        if question.known is not None:
            return question.known
        fresh = _fresh(question)
        await self._check_texts(fresh, arrival.live, self._info.max_context)
        large = many or _length_of(fresh) > _LONG
        tokens = await in_background(session.tokenise, question) if large else session.tokenise(question)
        return session.place(question, tokens, segment_id)

    def _grammar(self, request: CallRequest, prompt_ids: Int32Array) -> str | None:
        """What the response must look like: a call, an answer by a schema, or calls of strict tools."""
        if request.tool_choice.mode == "required":
            return self._required_call(request, prompt_ids)
        if request.schema is not None:
            return self._answer_grammar(request, request.schema, prompt_ids)
        if request.tools and request.strict and reads_tools(request):
            tools = [tool if _name(tool) in request.strict else _loose(tool) for tool in request.tools]
            several = request.parallel_tool_calls
            return self._rendering.call_grammar(tools, prompt_ids, required=False, several=several)
        return None

    def _required_call(self, request: CallRequest, prompt_ids: Int32Array) -> str:
        name = request.tool_choice.name
        tools = [tool for tool in request.tools or () if name is None or _name(tool) == name]
        several = request.parallel_tool_calls and name is None
        grammar = self._rendering.call_grammar(tools, prompt_ids, required=True, several=several)
        if grammar is None:
            raise Refusal(
                f"tool_choice 'required' and named tools are not supported with the renderer '{self._rendering.name}'. "
                "Use tool_choice 'auto'.",
                code="unsupported_value",
                param="tool_choice",
            )
        return grammar

    def _answer_grammar(self, request: CallRequest, schema: Mapping[str, Any], prompt_ids: Int32Array) -> str:
        tools = request.tools if reads_tools(request) else None
        grammar = self._rendering.grammar(schema, prompt_ids, tools)
        if grammar is None:
            together = " together with tools" if tools else ""
            raise Refusal(
                f"JSON answers{together} are not supported with the renderer '{self._rendering.name}'. Ask for JSON in "
                "the prompt, or let the answer be a tool call.",
                code="unsupported_value",
                param="response_format",
            )
        return grammar

    def _check_room(self, live: LiveAttempt | None, prompt_tokens: int, most: int | None = None) -> None:
        if prompt_tokens < (self._info.max_context if most is None else most):
            return
        if live is not None:
            why = f"A prompt of {prompt_tokens} tokens did not fit the context of {self._info.max_context}."
            live.mark_truncated(why)
        raise Refusal(
            # The words by which the clients of both providers recognise this error.
            f"prompt is too long: {prompt_tokens} tokens > {self._info.max_context} maximum. This model's maximum "
            f"context length is {self._info.max_context} tokens. Please reduce the length of the messages, or raise "
            "max_context of the algorithm, if the model can do more.",
            code="context_length_exceeded",
            param="messages",
        )

    def _check_limits(self, arrival: Arrival) -> None:
        live, limits = arrival.live, self._limits
        if limits.calls is not None and arrival.number >= limits.calls:
            why = f"This rollout may make {limits.calls} model calls, and has made them"
            live.mark_truncated(f"{why}.")
            raise Refusal(f"{why}. End the rollout with what there is.", code="max_calls_exceeded")
        if limits.tokens is not None and live.summary.response_tokens >= limits.tokens:
            raise self._used_up(live)

    def _used_up(self, live: LiveAttempt) -> Refusal:
        """The refusal of a request for which an attempt has no tokens left."""
        sampled = live.summary.response_tokens
        why = f"This rollout may have {self._limits.tokens} tokens sampled, and has had {sampled}"
        live.mark_truncated(f"{why}.")
        return Refusal(f"{why}. End the rollout with what there is.", code="max_tokens_exceeded")

    @asynccontextmanager
    async def share(self, asked: Asked) -> AsyncIterator[int]:
        """How many tokens each choice may have. They are set aside meanwhile, so that requests of one attempt at the
        same time do not use the same ones; a request for which there are none left waits for the others. Raises
        `Refusal` if nothing is left at all.
        """
        live, n = asked.arrival.live, asked.arrival.request.n
        room = self._info.max_context - len(asked.prompt_ids)
        if self._limits.tokens is None:
            yield room
            return
        wanted = min(room, int(asked.used.get("max_tokens") or room))
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
        used = settle(request.asked, self._overrides, live.mode, live.rollout_id, arrival.number)
        if request.tools and not request.parallel_tool_calls and request.tool_choice.mode != "required":
            markers = self._rendering.markers
            if markers is None or markers.tool_close is None:
                raise Refusal(
                    f"parallel_tool_calls=false is not supported with the renderer '{self._rendering.name}'.",
                    code="unsupported_value",
                    param="parallel_tool_calls",
                )
            used["stop_token_ids"] = (markers.tool_close,)
        return used


async def _length(session: Session, question: Question) -> int:
    """How many tokens the prompt of a request has, as the session would continue it."""
    if question.known is not None:
        return question.known.piece.end
    made = await in_background(session.tokenise, question)
    return len(made.ids) + (0 if made.after is None else made.after.response.end)


def _size(request: CallRequest) -> int:
    """Characters of a request's texts: no fewer than its tokens say."""
    raw = len(request.prompt) if isinstance(request.prompt, str) else 0
    return raw + _length_of(_texts(request.messages, request.tools))


def _fresh(question: Question) -> list[str]:
    """The texts of a request that are yet to be tokenised."""
    if question.goes_on:
        return list(_texts(question.messages[question.walk.turn_depth :], None))
    return list(_texts(question.messages, question.tools))


def _length_of(texts: Iterable[str]) -> int:
    return sum(map(len, texts))


def _texts(messages: Sequence[Message], tools: Sequence[Tool] | None) -> Iterator[str]:
    """All that a client may write at length."""
    for message in messages:
        yield message["content"]
        for call in message.get("tool_calls", ()):
            yield call["function"]["name"]
            yield call["function"]["arguments"]
    for tool in tools or ():
        yield _name(tool)
        yield str(tool["function"].get("description", ""))


def _name(tool: Tool) -> str:
    return tool["function"]["name"]


def _loose(tool: Tool) -> Tool:
    """The tool with arguments that may be anything."""
    return {**tool, "function": {**tool["function"], "parameters": {"type": "object"}}}


def reads_tools(request: CallRequest) -> bool:
    return bool(request.tools) and request.tool_choice.mode != "none"
