"""Anthropic Messages, and its counting of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects.base import Answered, Body, Dialect, StreamWriter, sse
from agentlightning.gateway.dialects.clearing import cleared
from agentlightning.gateway.dialects.fields import (
    Reading,
    ToolSet,
    assistant_message,
    begun_answer,
    given_settings,
    json_schema_of,
    part_text,
    required,
    required_choice,
    sent_call,
    text_of,
    tool_name,
    typed,
)
from agentlightning.gateway.dialects.tables.messages import (
    ASSISTANT_BLOCKS,
    FIELDS,
    MESSAGE,
    NESTED,
    OUTPUT_CONFIG,
    PARTS,
    TOOL_CHOICE,
    TOOLS,
    USER_PARTS,
)
from agentlightning.gateway.dialects.template import effort_of, thinking_of
from agentlightning.gateway.dialects.tools import check_parameters
from agentlightning.gateway.exchange import (
    Answer,
    AnswerSchema,
    CallRequest,
    Choice,
    Delta,
    Refusal,
    ToolChoice,
)
from agentlightning.gateway.sampling.settings import check_settings
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message, Tool

SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_tokens",
    "stop_sequences": "stop",
}

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}

_STOPS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesDialect(Dialect):
    """`POST /messages`, `POST /messages/count_tokens`."""

    name = "messages"
    title = "Messages"
    paths = ("/messages",)
    counting_paths = ("/messages/count_tokens",)
    id_prefix = "msg_"
    fields = FIELDS
    nested = NESTED
    client_params = "anthropic.types.beta.message_create_params:MessageCreateParamsNonStreaming"
    conversation_fields = ("messages", "system", "tools")

    def parse(self, body: Body, answered: Answered) -> CallRequest:
        reading = Reading()
        reading.check(body, FIELDS)
        system = text_of(body.get("system"), "system", PARTS, reading)
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        given = required(body, "messages", list)
        if not given:
            raise Refusal("'messages' is empty.", code="invalid_value", param="messages")
        given, applied = cleared(body, given, reading)
        for index, message in enumerate(given):
            messages.extend(_messages(message, f"messages[{index}]", reading))
        messages, begun = begun_answer(messages, "messages")
        tools = _tools(typed(body, "tools", list, []), reading)
        settings = given_settings(body, SETTINGS)
        check_settings(settings)
        choice = typed(body, "tool_choice", dict, {})
        reading.check(choice, TOOL_CHOICE, "tool_choice")
        return CallRequest(
            dialect=self.name,
            model=required(body, "model", str),
            messages=messages,
            tools=tools.declared or None,
            tool_choice=_tool_choice(choice, tools, reading),
            strict=tools.strict,
            parallel_tool_calls=not typed(choice, "disable_parallel_tool_use", bool, False),
            stream=typed(body, "stream", bool, False),
            schema=_schema(body, reading),
            asked=settings,
            template=(
                *effort_of(typed(body, "output_config", dict, {}), "effort", "output_config.effort"),
                *thinking_of(body, reading),
            ),
            begun=begun,
            left_out=reading.left_out,
            cleared=bool(applied),
            private={"context_management": {"applied_edits": applied}} if body.get("context_management") else {},
        )

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        choice = reply.choices[0]
        return msgspec.json.encode(
            {
                **_head(reply.response_id, reply.model),
                "content": _blocks(choice),
                **_stop(choice),
                "usage": _usage(len(reply.prompt_ids), len(choice.ids), reply.cached_tokens),
                **(request.private or {}),
            }
        )

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        return _MessagesWriter(request, response_id)

    def refuse(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode(_error(refusal))

    def credentials(self, api_key: str | None) -> dict[str, str]:
        return {"anthropic-version": "2023-06-01", **({"x-api-key": api_key} if api_key else {})}

    def answer_message(self, answer: Body) -> Message | None:
        return neutral_answer(answer["content"], "content", Reading())

    def gather(self, events: Sequence[Body]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        blocks: dict[int, dict[str, Any]] = {}
        arguments: dict[int, str] = {}
        for event in events:
            match event.get("type"):
                case "message_start":
                    whole = dict(event["message"])
                case "content_block_start":
                    blocks[event["index"]] = dict(event["content_block"])
                case "content_block_delta":
                    delta, block = event["delta"], blocks[event["index"]]
                    for name in ("text", "thinking"):
                        if name in delta:
                            block[name] = block.get(name, "") + delta[name]
                    if "partial_json" in delta:
                        arguments[event["index"]] = arguments.get(event["index"], "") + delta["partial_json"]
                case "message_delta":
                    whole["usage"] = {**whole.get("usage", {}), **(event.get("usage") or {})}
        for index, text in arguments.items():
            blocks[index]["input"] = msgspec.json.decode(text or "{}")
        return {**whole, "content": [blocks[index] for index in sorted(blocks)]} if whole else {}


class _MessagesWriter:
    """Anthropic's events: one content block open at a time."""

    def __init__(self, request: CallRequest, response_id: str) -> None:
        self._head = _head(response_id, request.model)
        self._private = request.private or {}
        self._index = -1
        self._open: str | None = None

    def start(self, prompt_tokens: int) -> bytes:
        message = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", message={**message, "usage": _usage(prompt_tokens, 0, 0)})

    def delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._into("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            out += self._block_delta({"type": "thinking_delta", "thinking": delta.reasoning})
        if delta.content:
            out += self._into("text", {"type": "text", "text": ""})
            out += self._block_delta({"type": "text_delta", "text": delta.content})
        return out

    def choice(self, choice: Choice) -> bytes:
        out = self._close()
        for call in choice.tool_calls:
            out += self._into(call.id, {"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
            arguments = call.arguments if call.arguments[:1] == "{" else _json(_object(call.arguments))
            out += self._block_delta({"type": "input_json_delta", "partial_json": arguments})
            out += self._close()
        usage = {"output_tokens": len(choice.ids)}
        return out + _event("message_delta", delta=_stop(choice), usage=usage, **self._private)

    def finish(self, reply: Answer) -> bytes:
        return _event("message_stop")

    def fail(self, refusal: Refusal) -> bytes:
        return sse(_error(refusal), "error")

    def _into(self, name: str, block: dict[str, Any]) -> bytes:
        """Make `name` the open block."""
        if self._open == name:
            return b""
        closed = self._close()
        self._index, self._open = self._index + 1, name
        return closed + _event("content_block_start", index=self._index, content_block=block)

    def _block_delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)

    def _close(self) -> bytes:
        if self._open is None:
            return b""
        self._open = None
        return _event("content_block_stop", index=self._index)


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)


def _head(response_id: str, model: str) -> dict[str, Any]:
    return {"id": response_id, "type": "message", "role": "assistant", "model": model}


def _blocks(choice: Choice) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if choice.reasoning:
        blocks.append({"type": "thinking", "thinking": choice.reasoning, "signature": ""})
    if choice.content:
        blocks.append({"type": "text", "text": choice.content})
    for call in choice.tool_calls:
        arguments = _object(call.arguments)
        blocks.append({"type": "tool_use", "id": call.id, "name": call.name, "input": arguments})
    return blocks


_WRAPPED = "_arguments"


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as the object Anthropic's format asks for; anything else is wrapped, so that nothing is lost."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = arguments
    return found if isinstance(found, dict) else {_WRAPPED: found}


def _unwrapped(input: Any) -> Any:
    """What `_object` made this of."""
    return input[_WRAPPED] if isinstance(input, dict) and input.keys() == {_WRAPPED} else input


def _stop(choice: Choice) -> dict[str, Any]:
    if choice.stop_string is not None and choice.finish_reason == "stop":
        return {"stop_reason": "stop_sequence", "stop_sequence": choice.stop_string}
    return {"stop_reason": _STOPS[choice.finish_reason], "stop_sequence": None}


def _usage(prompt: int, response: int, cached: int) -> dict[str, int]:
    return {
        "input_tokens": prompt - cached,
        "output_tokens": response,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
    }


def _error(refusal: Refusal) -> dict[str, Any]:
    """Anthropic's error shape, which has no place for the field's name but the message."""
    kind = _KINDS.get(refusal.status, "api_error" if refusal.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": refusal.message}}


def _messages(message: Any, where: str, reading: Reading) -> list[Message]:
    """One Anthropic message as neutral ones: tool results are messages of their own."""
    if not isinstance(message, dict):
        raise Refusal(f"'{where}' must be an object.", code="invalid_type", param=where)
    reading.check(message, MESSAGE, where)
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise Refusal(f"'{where}.role' must be user or assistant, not {role!r}.", code="invalid_value", param=where)
    if role == "assistant":
        return [neutral_answer(content, f"{where}.content", reading)]
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    results, texts = [], []
    for index, block in enumerate(required(message, "content", list)):
        place = f"{where}.content[{index}]"
        if isinstance(block, dict) and block.get("type") == "tool_result":
            reading.known(block, USER_PARTS, place)
            text = text_of(block.get("content"), f"{place}.content", PARTS, reading)
            results.append({"role": "tool", "content": text, "tool_call_id": str(block.get("tool_use_id", ""))})
        else:
            text = part_text(block, place, PARTS, reading)
            texts += [text] if text else []
    return [*results, *([{"role": role, "content": "".join(texts)}] if texts or not results else [])]


def neutral_answer(content: Any, where: str, reading: Reading) -> Message:
    """What an assistant said, as a neutral message."""
    if not isinstance(content, list):
        return assistant_message(text_of(content, where, ASSISTANT_BLOCKS, reading), [], None)
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(content):
        place = f"{where}[{index}]"
        match block.get("type") if isinstance(block, dict) else None:
            case "thinking":
                reading.known(block, ASSISTANT_BLOCKS, place)
                thoughts.append(typed(block, "thinking", str, ""))
            case "tool_use":
                reading.known(block, ASSISTANT_BLOCKS, place)
                called = {**block, "input": _unwrapped(block.get("input") or {})}
                calls.append(sent_call(called, place, id="id", arguments="input"))
            case _:
                texts.append(part_text(block, place, ASSISTANT_BLOCKS, reading))
    return assistant_message("".join(texts), calls, "".join(thoughts))


def _tools(given: Sequence[Any], reading: Reading) -> ToolSet:
    declared: list[Tool] = []
    strict: dict[str, str] = {}
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        if reading.known(tool, TOOLS, where) is None:
            continue
        name = tool_name(tool, where)
        check_parameters(tool.get("input_schema"), f"{where}.input_schema")
        if tool.get("strict") is True:
            strict[name] = f"{where}.input_schema"
        described = {"description": tool["description"]} if tool.get("description") else {}
        function = {"name": name, **described, "parameters": tool.get("input_schema", {})}
        declared.append({"type": "function", "function": function})
    return ToolSet(declared, strict, len(declared) == len(given))


def _schema(body: Mapping[str, Any], reading: Reading) -> AnswerSchema | None:
    """The schema of the answer, where Anthropic's API has it now and where its beta had it."""
    config = typed(body, "output_config", dict, {})
    reading.check(config, OUTPUT_CONFIG, "output_config")
    if config.get("format") is not None:
        return json_schema_of(config["format"], "output_config.format", reading)
    return json_schema_of(body.get("output_format"), "output_format", reading)


def _tool_choice(choice: Mapping[str, Any], tools: ToolSet, reading: Reading) -> ToolChoice:
    names = [tool["function"]["name"] for tool in tools.declared]
    match choice.get("type"):
        case None | "auto":
            return ToolChoice()
        case "none":
            return ToolChoice("none")
        case "any":
            return required_choice(ToolChoice("required"), names, tools.all_given, reading)
        case "tool":
            wanted = ToolChoice("required", required(choice, "name", str))
            return required_choice(wanted, names, tools.all_given, reading)
        case kind:
            reading.unknown(f"tool_choice:{kind}")
            return ToolChoice()
