"""What is done with a large request, beside the event loop. Pure but for the renderings that it has loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import msgspec

from agentlightning.errors import AgentLightningError, ModelError
from agentlightning.gateway.dialects import DIALECTS
from agentlightning.gateway.dialects.fields import check_strict, required
from agentlightning.gateway.exchange import UNUSABLE, CallRequest, Refusal
from agentlightning.gateway.history.tree import MessageKeys
from agentlightning.gateway.large.wire import (
    Answer,
    Bridge,
    Broken,
    Counted,
    Encode,
    Exceeds,
    Flag,
    Grammar,
    Impossible,
    Load,
    MakeGrammar,
    Measure,
    NeedsHistory,
    PromptFields,
    Question,
    Read,
    RefusedRequest,
    Render,
    Taken,
    TokenIds,
    Unloadable,
    Unmeasured,
    encoded as as_sent,
)
from agentlightning.gateway.limits import checked
from agentlightning.gateway.prompts import KINDS, Injected, with_prompts
from agentlightning.gateway.sampling.constraint import constraint_of, encoded, grammar_of
from agentlightning.gateway.sampling.served import as_served
from agentlightning.gateway.sampling.size import COUNTED, LONG, fewest_tokens, least_of, size_of, texts_of, too_long
from agentlightning.gateway.stable_prefix import parse_stable
from agentlightning.rendering import Rendering, load_rendering
from agentlightning.rendering.base import RenderingSource
from agentlightning.rendering.messages import Message, with_tool_names
from agentlightning.types.arrays import int32_array, int32_bytes

logger = logging.getLogger(__name__)

Stopped = Callable[[], bool]

_PIECE = 256
"""Messages."""
_PER_TOKEN = 4
"""Characters that a token stands for, roughly."""
_dialects = {dialect.name: dialect for dialect in DIALECTS}


class _UnloadableError(Exception):
    """A rendering could not be loaded."""


class _WantedError(Exception):
    """The history of this response is needed."""


class _Answered(Mapping[str, Sequence[Message]]):
    """Histories by response id, of which none is here before it has been asked for."""

    def __init__(self, known: Mapping[str, list[Message] | None]) -> None:
        self._known = known

    def __contains__(self, response_id: object) -> bool:
        return self._found(response_id) is not None

    def __getitem__(self, response_id: str) -> Sequence[Message]:
        found = self._found(response_id)
        if found is None:
            raise KeyError(response_id)
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def _found(self, response_id: object) -> list[Message] | None:
        if response_id not in self._known:
            raise _WantedError(response_id)
        return self._known[str(response_id)]


def answer(question: Question, body: bytes | bytearray, stopped: Stopped) -> bytes:
    """The answer to a question, as it is sent; what goes wrong is one, too. What takes long gives up when it is
    `stopped`.
    """
    try:
        return as_sent(_answer(question, body, stopped))
    except _UnloadableError as error:
        failure = Unloadable(str(error))
    except ModelError as error:
        failure = Impossible(str(error))
    except UNUSABLE as error:
        failure = Broken(str(error), is_request=True)
    except Exception as error:  # the process lives on, and the gateway says what happened
        logger.exception("Work on a large request failed.")
        failure = Broken(f"{type(error).__name__}: {error}")
    return as_sent(failure)


def _answer(question: Question, body: bytes | bytearray, stopped: Stopped) -> Answer:
    match question:
        case Load():
            return Flag(_least(question.source) > 0)
        case Read():
            return _read(question, body, stopped)
        case Render():
            return TokenIds(int32_bytes(_rendering(question.source).render(question.messages, question.tools)))
        case Bridge():
            added = _rendering(question.source).bridge(
                int32_array(question.prompt_ids),
                int32_array(question.response_ids),
                question.messages,
                question.tools,
                keep_reasoning=question.keep_reasoning,
            )
            return TokenIds(None if added is None else int32_bytes(added))
        case Encode():
            return TokenIds(int32_bytes(_rendering(question.source).encode(question.text)))
        case Exceeds():
            return Flag(_rendering(question.source).exceeds(question.texts, question.tokens, stopped))
        case MakeGrammar():
            return _grammar(question)


def _rendering(source: RenderingSource) -> Rendering:
    return _loaded(source.base).with_arguments(msgspec.json.decode(source.arguments))


@cache
def _loaded(source: RenderingSource) -> Rendering:
    try:
        return load_rendering(source.path, source.renderer)
    except (AgentLightningError, OSError) as error:
        raise _UnloadableError(str(error)) from error


@cache
def _least(source: RenderingSource) -> int:
    return least_of(_rendering(source))


def _grammar(work: MakeGrammar) -> Answer:
    try:
        return Grammar(grammar_of(work.constraint, _rendering(work.source), work.in_reasoning))
    except Refusal as refusal:
        return RefusedRequest.by(refusal)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _read(read: Read, body: bytes | bytearray, stopped: Stopped) -> Answer:
    model = "unknown"
    try:
        dialect = _dialects[read.dialect]
        given = dialect.located(checked(body, read.limits), read.path, read.query)
        if read.prompts:
            given = with_prompts(read.dialect, given, [_prompt(prompt) for prompt in read.prompts], read.agent)
        model = required(given, "model", str)
        if read.names and model not in read.names:
            model = read.names[0]
        measure = read.models.get(model)
        if measure is None:
            return Unmeasured(model)
        request = parse_stable(dialect, given, _Answered(read.answered))
        read.limits.check_stops(request.asked.get("stop", ()))
        if read.strict:
            check_strict(request.left_out)
        if (constraint := constraint_of(request)) is not None:
            encoded(constraint, read.limits.schema_bytes)
        if read.counting:
            return Counted(_count(request, measure, stopped))
        measured = measure.refuses and _check_length(request, measure, stopped)
    except _WantedError as wanted:
        return NeedsHistory(*wanted.args)
    except Refusal as refusal:
        return RefusedRequest.by(refusal, model)
    return _taken(model, request, measured)


def _prompt(prompt: PromptFields) -> Injected:
    return KINDS[prompt.kind].model_validate(prompt.fields)


def _check_length(request: CallRequest, measure: Measure, stopped: Stopped) -> bool:
    """Refuse a request that cannot fit. Whether its texts were counted: those of a conversation that goes on have been,
    turn by turn, unless they are suspiciously long.
    """
    most, rendering = measure.max_context, _rendering(measure.source)
    fewest = fewest_tokens(request, rendering, lambda: _least(measure.source))
    if fewest >= most:
        raise too_long(fewest, most, at_least=True)
    size = size_of(request)
    if any(m["role"] == "assistant" for m in request.messages) and size <= _PER_TOKEN * most:
        return False
    if size > LONG and rendering.exceeds(texts_of(request), most, stopped):
        raise too_long(most + 1, most, at_least=True)
    return True


def _count(request: CallRequest, measure: Measure, stopped: Stopped) -> int:
    rendering = _rendering(measure.source)
    request, most = as_served(request, rendering), COUNTED * measure.max_context
    fewest = fewest_tokens(request, rendering, lambda: _least(measure.source))
    if fewest >= most or rendering.exceeds(texts_of(request), most, stopped):
        raise too_long(max(fewest, most + 1), measure.max_context, at_least=True)
    try:
        rendering = rendering.with_arguments(request.arguments)
        return len(rendering.render(with_tool_names(request.messages), request.tools))
    except ModelError as error:
        raise Refusal(str(error), code="invalid_messages", param="messages") from error


def _taken(model: str, request: CallRequest, measured: bool) -> Taken:
    messages, remembered = request.messages, request.remember
    pieces = [messages[at : at + _PIECE] for at in range(0, len(messages), _PIECE)]
    return Taken(
        model,
        request=msgspec.structs.replace(
            request,
            messages=[],
            remember=None,
            measured=measured,
            size=size_of(request),
            digests=MessageKeys.made(messages).digests,
        ),
        pieces=[msgspec.Raw(msgspec.msgpack.encode(piece)) for piece in pieces],
        remembered_from=None if remembered is None else len(messages) - len(remembered),
    )
