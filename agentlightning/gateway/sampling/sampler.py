"""The sampler: one request becomes a prompt, the engine's tokens, a message, and a record. Knows no wire format.

Order matters here: a response is committed to the session and handed to the recorder before anyone sees it, so a client
that goes away never loses a call, and the next request can always continue it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec

from agentlightning.engine.base import Chunk, Engine, EngineInfo, PromptLogprobs, SamplingParams, concat
from agentlightning.errors import ConfigError, EngineError, ModelError
from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, PromptEcho, Refusal, ToolCall
from agentlightning.gateway.history.tree import Piece, Turn, unrecorded
from agentlightning.gateway.large.requests import LargeRequests
from agentlightning.gateway.recording.recorder import Recorder
from agentlightning.gateway.recording.records import call_span, refusal_span
from agentlightning.gateway.replay import REPLAYED, recorded_chunks, span_source_of, stopped_by, with_sources
from agentlightning.gateway.routing.models import AttemptLimits, Selection
from agentlightning.gateway.sampling.constraint import reads_tools
from agentlightning.gateway.sampling.planner import Arrival, PlannedRequest, Planner
from agentlightning.gateway.sampling.response import (
    ChoiceStream,
    Emit,
    cut_at_stop,
    each_prompt,
    split_prompt,
    text_after,
    without_stop,
    without_tokens,
)
from agentlightning.gateway.sampling.settings import Overrides, cut_off_by, params_for, samples_nothing
from agentlightning.rendering import Parsed, Rendering
from agentlightning.rendering.messages import Message
from agentlightning.rendering.reader import StreamReader, Text
from agentlightning.types import CallInfo, CallRecord, Divergence, RolloutMode, Segment, VersionRun
from agentlightning.types.arrays import Int32Array, np

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Sampler:
    """Answers requests from one engine."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        rendering: Rendering,
        recorder: Recorder,
        large: LargeRequests,
        *,
        policy: str,
        trained: bool = True,
        selection: Selection,
        limits: AttemptLimits,
        overrides: Overrides,
        cut_long_prompts: bool = False,
        filter_replay: bool = False,
    ) -> None:
        self._engine = engine
        self._info = info
        self.rendering = rendering
        self._recorder = recorder
        self._policy = policy
        self._trained = trained
        self.measure = large.measure(rendering, info.max_context, refuses=not cut_long_prompts)
        self._selection = selection
        self._keeps = filter_replay
        self._planner = Planner(
            info,
            rendering,
            large,
            policy=policy,
            limits=limits,
            overrides=overrides,
            cut_long_prompts=cut_long_prompts,
            trained=trained,
        )

    @property
    def model(self) -> str:
        """The name of the model that the engine serves."""
        return self._info.model

    @property
    def scores_prompts(self) -> bool:
        """Whether the engine tells log-probs of a prompt's tokens."""
        return self._info.scores_prompts

    async def answer(self, arrival: Arrival, emit: Emit | None) -> Answer:
        """Sample all choices of a request. `emit` is given what a stream shows. Raises `Refusal`."""
        planned: list[PlannedRequest] = []
        try:
            await self._plan(arrival, planned)
            begun = (
                None
                if emit is None
                else ChoiceStream(emit, sum(len(one.prompt_ids) for one in planned), arrival.request.n)
            )
            found = await _all([self._all_choices(one, at, begun) for at, one in enumerate(planned)])
        finally:
            for one in planned:
                one.give_back()
        choices = [choice for of_prompt in found for choice in of_prompt]
        return Answer(
            response_id=arrival.response_id,
            created=int(arrival.start),
            model=arrival.request.model,
            prompts=tuple(one.prompt_ids for one in planned),
            cached_tokens=choices[0][1],
            choices=tuple(msgspec.structs.replace(choice, index=at) for at, (choice, _) in enumerate(choices)),
        )

    async def _plan(self, arrival: Arrival, planned: list[PlannedRequest]) -> None:
        """Plan each prompt of the request, and add it to `planned`."""
        try:
            for one in each_prompt(arrival):
                planned.append(await self._planner.plan(one))
        except Refusal as refusal:
            self._record_refusal(arrival, refusal)
            raise

    async def _all_choices(
        self, planned: PlannedRequest, at: int, begun: ChoiceStream | None
    ) -> list[tuple[Choice, int]]:
        """The choices of the prompt in this place."""
        try:
            async with self._planner.share(planned) as most_tokens:
                emit = None if begun is None else begun.of_prompt(at)
                count = planned.arrival.request.n
                return await _all([self._choose(planned, index, most_tokens, emit) for index in range(count)])
        except Refusal as refusal:
            if refusal.wire_code == "max_tokens_exceeded":
                self._record_refusal(planned.arrival, refusal)
            raise

    async def count(self, request: CallRequest, live: LiveAttempt) -> int:
        """How many tokens the prompt of a request has, rendered anew. Raises `Refusal` if it cannot be rendered."""
        return await self._planner.count(request, live)

    # ---- sampling --------------------------------------------------------------------------------------------------

    async def _choose(
        self, planned: PlannedRequest, index: int, most_tokens: int, emit: Emit | None
    ) -> tuple[Choice, int]:
        """Sample a choice to its end and record it, whatever the end is. Returns it and the cached prompt tokens."""
        chunks: list[Chunk] = []
        turns = planned.arrival.live.turns
        empty = samples_nothing(planned.used)
        try:
            await turns.take()
            shown = None if empty else emit
            reader = await self._sample(planned, self._params(planned, index, most_tokens), index, chunks, shown)
            if not chunks or chunks[-1].finish_reason not in ("stop", "length"):
                raise EngineError("The engine ended the response before it was finished.")
            await turns.take()
        except asyncio.CancelledError:
            self._record_failure(planned, index, chunks, planned.arrival.live.ended or "the client disconnected")
            raise
        except (EngineError, ModelError, ConfigError) as error:
            self._record_failure(planned, index, chunks, str(error))
            if isinstance(error, EngineError):
                planned.arrival.live.mark_infra_error(str(error))
            raise _engine_refusal(error) from error
        whole = without_tokens(concat(chunks)) if empty else concat(chunks)
        choice = self._read(planned, index, whole)
        turn = self._commit(planned, choice, chunks, whole)
        self._record(planned, choice, turn)
        limit = cut_off_by(choice.finish_reason, planned.used, len(whole.ids))
        if limit is not None:
            planned.arrival.live.mark_limited(limit)
        elif not planned.arrival.place.judge:
            planned.arrival.live.mark_answered(planned.arrival.number)
        planned.arrival.live.count(calls=1, prompt_tokens=len(planned.prompt_ids), response_tokens=len(whole.ids))
        if emit is not None:
            if reader is None and choice.prompt is not None:
                emit(Delta(index=index, content=choice.prompt.text if planned.arrival.request.echo else ""))
            elif reader is not None:
                rest = reader.finish(choice.content, choice.reasoning)
                emit(Delta(index=index, content=rest.content, reasoning=rest.reasoning))
            emit(choice)
        return choice, max(chunk.cached_tokens for chunk in chunks)

    async def _sample(
        self, planned: PlannedRequest, params: SamplingParams, index: int, chunks: list[Chunk], emit: Emit | None
    ) -> StreamReader | None:
        request = planned.arrival.request
        request_id = f"{planned.arrival.response_id}:{index}"
        if index in planned.reserved:
            recorded = planned.replayed[index] = planned.reserved.pop(index)
            stream = recorded_chunks(recorded, stopped_by(recorded, params.stop, self.rendering.decode))
        else:
            stream = self._engine.generate(planned.prompt_ids, params, stream=emit is not None, request_id=request_id)
        async with aclosing(stream):
            if emit is None:
                async for chunk in stream:
                    chunks.append(chunk)
                return None
            prompt_ids, begun = split_prompt(planned)
            reader = StreamReader(
                self.rendering,
                prompt_ids,
                tools=reads_tools(request),
                stop=params.stop,
                raw=request.prompt is not None,
                shows_stop=request.shows_stop,
                begun=begun.tolist(),
            )
            async for chunk in stream:
                if request.echo and not chunks:  # a request that fails has shown nothing before
                    emit(Delta(index=index, content=self._prompt_text(planned)))
                chunks.append(chunk)
                emit(_delta(index, chunk, reader.feed(self._shown(request, chunk.ids).tolist())))
        return reader

    def _shown(self, request: CallRequest, ids: Int32Array) -> Int32Array:
        """The tokens of an answer that its text is made of."""
        if not request.skips_special:
            return ids
        return ids[~np.isin(ids, [*self.rendering.odd_ids, *self.rendering.stop_token_ids])]

    def _params(self, planned: PlannedRequest, index: int, most_tokens: int) -> SamplingParams:
        top_logprobs = planned.arrival.request.top_logprobs
        params = params_for(
            planned.used, choice=index, most_tokens=most_tokens, top_logprobs=top_logprobs, grammar=planned.grammar
        )
        live = planned.arrival.live
        keeps = self._keeps and live.mode is RolloutMode.TRAIN
        wanted = planned.arrival.request.scores_prompt
        return msgspec.structs.replace(params, owner=live.attempt_id, keeps=keeps, prompt_logprobs=wanted)

    # ---- after sampling --------------------------------------------------------------------------------------------

    def _parse(self, planned: PlannedRequest, whole: Chunk) -> Parsed:
        request = planned.arrival.request
        if request.prompt is not None:
            stops = (*self.rendering.stop_token_ids, *request.asked.get("stop_token_ids", ()))
            text = self.rendering.decode(self._shown(request, without_stop(whole.ids, stops)))
            return Parsed(cut_at_stop(text, whole.stop_string, request.shows_stop))
        prompt_ids, begun = split_prompt(planned)
        ids = without_stop(whole.ids, request.asked.get("stop_token_ids", ()))
        ids = np.concatenate([begun, ids]) if planned.begun else ids
        parsed = self.rendering.parse(ids, prompt_ids, request.tools if reads_tools(request) else None)
        if planned.begun:
            parsed = msgspec.structs.replace(parsed, content=text_after(request.begun, parsed.content), reasoning=None)
        return msgspec.structs.replace(
            parsed, content=cut_at_stop(parsed.content, whole.stop_string, request.shows_stop).rstrip()
        )

    def _read(self, planned: PlannedRequest, index: int, whole: Chunk) -> Choice:
        parsed = self._parse(planned, whole)
        recorded = planned.replayed[index].tool_call_ids if index in planned.replayed else ()
        ids = [*recorded, *(f"call_{uuid.uuid4().hex[:24]}" for _ in parsed.tool_calls[len(recorded) :])]
        calls = tuple(ToolCall(i, c.name, c.arguments) for i, c in zip(ids, parsed.tool_calls, strict=False))
        reason = whole.finish_reason or "stop"
        return Choice(
            index=index,
            content=parsed.content,
            begun=planned.arrival.request.begun,
            reasoning=parsed.reasoning,
            tool_calls=calls,
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
            stop_string=whole.stop_string,
            ids=whole.ids,
            logprobs=whole.plain_logprobs,
            top_ids=whole.top_ids,
            top_logprobs=whole.top_logprobs,
            reasoning_tokens=self._reasoning_tokens(parsed, whole),
            prompt=self._echo(planned, whole.prompt),
        )

    def _echo(self, planned: PlannedRequest, logprobs: PromptLogprobs | None) -> PromptEcho | None:
        """The prompt, where the request asks for something of it."""
        request = planned.arrival.request
        if not request.echo and request.scores_prompt is None:
            return None
        return PromptEcho(self._prompt_text(planned), planned.prompt_ids, logprobs)

    def _prompt_text(self, planned: PlannedRequest) -> str:
        prompt = planned.arrival.request.prompt
        return prompt if isinstance(prompt, str) else self.rendering.decode(planned.prompt_ids)

    def _reasoning_tokens(self, parsed: Parsed, whole: Chunk) -> int:
        """How many tokens of a response are reasoning: those up to the mark that ends it, or all where none does."""
        markers = self.rendering.markers
        if not parsed.reasoning or markers is None or markers.think_close is None:
            return 0
        (ends,) = np.nonzero(whole.ids == markers.think_close)
        return int(ends[0]) + 1 if len(ends) else len(whole.ids)

    def _commit(self, planned: PlannedRequest, choice: Choice, chunks: list[Chunk], whole: Chunk) -> Turn:
        complete, message, replay = not samples_nothing(planned.used), choice.message(), planned.arrival.live.replay
        if replay is not None and complete and choice.index not in planned.replayed:
            replay.edits.sampled(message)
        return self._grow(planned, choice.index, message, chunks, whole, complete=complete)

    def _grow(
        self,
        planned: PlannedRequest,
        index: int,
        message: Message,
        chunks: list[Chunk],
        whole: Chunk,
        *,
        complete: bool,
    ) -> Turn:
        call_id = f"{planned.arrival.response_id}:{index}"
        return planned.arrival.live.session(self._policy).commit(
            planned.prompt,
            message,
            call_id,
            segment_id=f"{call_id}/r",
            ids=whole.ids,
            logprobs=whole.logprobs,
            plain_logprobs=whole.plain_logprobs,
            versions=_version_runs(chunks),
            kept=whole.kept,
            complete=complete,
        )

    def _record(self, planned: PlannedRequest, choice: Choice, turn: Turn) -> None:
        info = self._info_of(planned, choice.index, choice.finish_reason, None)
        self._put(planned, info, turn.prompt, turn.response, choice.message(), len(choice.ids))

    def _record_failure(self, planned: PlannedRequest, index: int, chunks: list[Chunk], error: str) -> None:
        """A call that did not end well is data too: with the tokens it had, or with none."""
        info = self._info_of(planned, index, "abort", error)
        if planned.arrival.live.replay is not None and index in planned.replayed:
            planned.arrival.live.replay.give_back(planned.replayed[index])
        empty = np.empty(0, np.int32), np.empty(0, np.float32)
        none = Chunk(ids=empty[0], logprobs=empty[1], plain_logprobs=empty[1], version=self._info.version)
        whole = concat(chunks) if chunks else none
        # Who hangs up before the end has had these sampled as well.
        planned.arrival.live.count(failed=1, response_tokens=len(whole.ids))
        message: Message = {"role": "assistant", "content": self.rendering.decode(whole.ids)}
        turn = self._grow(planned, index, message, chunks, whole, complete=False)
        self._put(planned, info, turn.prompt, turn.response, message, len(whole.ids))

    def _put(
        self,
        planned: PlannedRequest,
        info: CallInfo,
        prompt: Piece,
        response: Piece,
        output: Message,
        response_tokens: int,
    ) -> None:
        arrival = planned.arrival
        segments: tuple[Segment, ...] = unrecorded(response)
        if (recorded := planned.replayed.get(info.choice)) is not None:
            segments = with_sources(segments, recorded, prompt.segment.segment_id, response.segment.segment_id)
        first = f"{arrival.response_id}:0"
        messages = arrival.request.messages[planned.prompt.new_from :] if info.choice == 0 else ()
        remembered = arrival.request.remember
        begins = planned.prompt.parent is None and info.choice == 0
        left_out = arrival.live.unrecorded(arrival.request.left_out)

        def draft() -> CallRecord:
            span = call_span(
                info,
                arrival.place,
                input_messages=messages,
                output=output,
                same_input_as=first if info.choice else None,
                tools=arrival.request.tools if begins else None,
                arguments=arrival.request.arguments if begins else {},
                prompt_tokens=len(planned.prompt_ids),
                response_tokens=response_tokens,
                remembers_from=None if remembered is None else len(arrival.request.messages) - len(remembered),
                left_out=left_out,
            )
            ends = prompt.segment.segment_id, response.segment.segment_id
            return CallRecord(info, *ends, segments, span, None if recorded is None else span_source_of(recorded))

        self._recorder.put(arrival.live.key, draft)

    def _info_of(self, planned: PlannedRequest, index: int, finish_reason: str, error: str | None) -> CallInfo:
        arrival, parent = planned.arrival, planned.prompt.parent
        return CallInfo(
            call_id=f"{arrival.response_id}:{index}",
            response_id=arrival.response_id,
            rollout_id=arrival.live.rollout_id,
            attempt_id=arrival.live.attempt_id,
            choice=index,
            policy=self._policy,
            trained=self._trained
            and index not in planned.replayed
            and not arrival.place.judge
            and not samples_nothing(planned.used)
            and self._selected(arrival),
            agent=arrival.place.agent,
            parent_call_id=None if parent is None else parent.call_id,
            model=arrival.request.model,
            dialect=arrival.request.dialect,
            finish_reason=finish_reason,
            start_time=arrival.start,
            end_time=time.time(),
            temperature=float(planned.used.get("temperature", 1.0)),
            asked=arrival.request.asked,
            used={**planned.used, **({REPLAYED: planned.replayed[index].call_id} if index in planned.replayed else {})},
            divergence=self._diverged(arrival) or planned.prompt.divergence,
            error=error,
        )

    @staticmethod
    def _diverged(arrival: Arrival) -> Divergence | None:
        """How the attempt left its recording, said at the first call that did."""
        replay = arrival.live.replay
        return replay.take_divergence() if replay is not None else None

    def _selected(self, arrival: Arrival) -> bool:
        return self._selection.includes(arrival.place.agent, arrival.request.messages)

    def _record_refusal(self, arrival: Arrival, refusal: Refusal) -> None:
        arrival.live.mark_refused(refusal.message)
        live, model, end = arrival.live, arrival.request.model, time.time()

        def draft() -> Any:
            call_id = f"{arrival.response_id}:0"
            return refusal_span(
                live.rollout_id, live.attempt_id, arrival.place, call_id, model, refusal.message, arrival.start, end
            )

        self._recorder.put(live.key, draft)


async def _all(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all; when one fails the others are cancelled (and recorded as such) before its error goes up."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _delta(index: int, chunk: Chunk, text: Text) -> Delta:
    return Delta(
        index=index,
        content=text.content,
        reasoning=text.reasoning,
        ids=chunk.ids,
        logprobs=chunk.plain_logprobs,
        top_ids=chunk.top_ids,
        top_logprobs=chunk.top_logprobs,
    )


def _version_runs(chunks: list[Chunk]) -> tuple[VersionRun, ...]:
    runs: list[VersionRun] = []
    at = 0
    for chunk in chunks:
        if not runs or runs[-1].version != chunk.version:
            runs.append(VersionRun(at, chunk.version))
        at += len(chunk.ids)
    return tuple(runs)


def _engine_refusal(error: Exception) -> Refusal:
    if isinstance(error, ModelError | ConfigError):
        return Refusal(str(error), code="invalid_request")
    return Refusal(f"Sampling failed: {error}", status=503, kind="server_error", code="engine_error")
