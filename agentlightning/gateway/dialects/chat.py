"""OpenAI Chat Completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects.base import (
    Answered,
    Body,
    Dialect,
    StreamWriter,
    logprob_rows,
    openai_error,
    prompt_rows,
    sse,
)
from agentlightning.gateway.dialects.fields import (
    Reading,
    ToolSet,
    assistant_message,
    begun_answer,
    between,
    given_settings,
    json_schema_of,
    neutral_call,
    prompt_logprobs_of,
    required,
    sent_call,
    streaming_usage,
    text_of,
    tool_choice_of,
    tool_name,
    typed,
)
from agentlightning.gateway.dialects.guided import guided_schema
from agentlightning.gateway.dialects.tables.chat import (
    CALLED,
    CALLS,
    CUSTOM,
    CUSTOM_CALLED,
    FIELDS,
    FUNCTION,
    MESSAGES,
    NESTED,
    PARTS,
    STREAM_OPTIONS,
    TOOLS,
)
from agentlightning.gateway.dialects.template import template_of
from agentlightning.gateway.dialects.tools import (
    Origin,
    arguments_of_text,
    check_parameters,
    origin_of,
    text_function,
    text_of_call,
)
from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, Refusal, ToolCall
from agentlightning.gateway.sampling.settings import check_settings
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message, Tool

SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "logit_bias": "logit_bias",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "stop": "stop",
    "seed": "seed",
    **{name: name for name in ("stop_token_ids", "min_tokens", "ignore_eos")},
}

_MAX_CHOICES = 128
_MAX_TOP_LOGPROBS = 20


class ChatDialect(Dialect):
    """`POST /chat/completions`."""

    name = "chat"
    title = "Chat Completions"
    paths = ("/chat/completions",)
    id_prefix = "chatcmpl-"
    fields = FIELDS
    nested = NESTED
    client_params = "openai.types.chat.completion_create_params:CompletionCreateParamsNonStreaming"
    conversation_fields = ("messages", "tools")

    def parse(self, body: Body, answered: Answered) -> CallRequest:
        reading = Reading()
        reading.check(body, FIELDS)
        messages = required(body, "messages", list)
        if not messages:
            raise Refusal("'messages' is empty.", code="invalid_value", param="messages")
        neutral = [neutral_message(m, f"messages[{i}]", reading) for i, m in enumerate(messages)]
        neutral, begun = _begun(body, neutral, reading)
        tools = _tools(typed(body, "tools", list, []), reading)
        if body.get("top_logprobs") and not body.get("logprobs"):
            reading.unavailable("top_logprobs", "it needs logprobs: true")
        streaming = typed(body, "stream_options", dict, {})
        reading.check(streaming, STREAM_OPTIONS, "stream_options")
        settings = given_settings(body, SETTINGS)
        check_settings(settings)
        return CallRequest(
            dialect=self.name,
            model=required(body, "model", str),
            messages=neutral,
            tools=tools.declared or None,
            tool_choice=tool_choice_of(body.get("tool_choice"), tools, reading),
            strict=tools.strict,
            parallel_tool_calls=typed(body, "parallel_tool_calls", bool, True),
            n=between(body, "n", 1, 1, _MAX_CHOICES),
            stream=typed(body, "stream", bool, False),
            include_usage=typed(streaming, "include_usage", bool, False),
            logprobs=typed(body, "logprobs", bool, False),
            top_logprobs=between(body, "top_logprobs", 0, 0, _MAX_TOP_LOGPROBS),
            return_token_ids=typed(body, "return_token_ids", bool, False),
            prompt_logprobs=prompt_logprobs_of(body),
            tokens_as_ids=typed(body, "return_tokens_as_token_ids", bool, False),
            schema=json_schema_of(body.get("response_format"), "response_format", reading)
            or guided_schema(body, reading),
            asked=settings,
            shows_stop=typed(body, "include_stop_str_in_output", bool, False),
            template=template_of(body, reading),
            begun=begun,
            left_out=reading.left_out,
            private=tools.origins,
        )

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        body: dict[str, Any] = {
            "id": reply.response_id,
            "object": "chat.completion",
            "created": reply.created,
            "model": reply.model,
            "choices": [_choice(request, choice, rendering) for choice in reply.choices],
            "usage": _usage(reply),
        }
        if request.return_token_ids:
            body["prompt_token_ids"] = reply.prompt_ids.tolist()
        if request.prompt_logprobs is not None:
            body["prompt_logprobs"] = prompt_rows(reply.choices[0], request, rendering)
        return msgspec.json.encode(body)

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        return _ChatWriter(request, response_id, created, rendering)

    def refuse(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode(openai_error(refusal))

    def asking_for_usage(self, body: Body) -> Body:
        return streaming_usage(body)

    def answer_message(self, answer: Body) -> Message | None:
        return neutral_message(answer["choices"][0]["message"], "message", Reading())

    def gather(self, events: Sequence[Body]) -> dict[str, Any]:
        whole: dict[str, Any] = {}
        begun = False
        message: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": ""}
        calls: dict[int, dict[str, Any]] = {}
        ids: list[int] = []
        for event in events:
            names = ("id", "model", "usage", "prompt_token_ids")
            whole |= {name: event[name] for name in names if event.get(name) is not None}
            for choice in event.get("choices") or ():
                begun = True
                if choice.get("index", 0) != 0:
                    continue
                ids += choice.get("token_ids") or ()
                delta = choice.get("delta") or {}
                for name in ("content", "reasoning_content"):
                    message[name] += delta.get(name) or ""
                for part in delta.get("tool_calls") or ():
                    empty = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
                    call = calls.setdefault(part.get("index", 0), empty)
                    call["id"] = part.get("id") or call["id"]
                    for name, text in (part.get("function") or {}).items():
                        call["function"][name] = call["function"].get(name, "") + (text or "")
        if calls:
            message["tool_calls"] = [calls[index] for index in sorted(calls)]
        return {**whole, "choices": [{"message": message, "token_ids": ids}]} if begun else whole


class _ChatWriter:
    """Chat completion chunks: the role first, then text as it comes, then tool calls with the finish reason."""

    def __init__(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> None:
        self._request = request
        self._rendering = rendering
        self._head = {
            "id": response_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": request.model,
        }

    def start(self, prompt_tokens: int) -> bytes:
        role = {"role": "assistant", "content": ""}
        return b"".join(self._chunk(i, role) for i in range(self._request.n))

    def delta(self, delta: Delta) -> bytes:
        change: dict[str, Any] = {}
        if delta.content:
            change["content"] = delta.content
        if delta.reasoning:
            change["reasoning_content"] = delta.reasoning
        extra: dict[str, Any] = {}
        if delta.ids is not None and delta.logprobs is not None:
            if self._request.logprobs:
                extra["logprobs"] = _logprobs(delta, self._request, self._rendering)
            if self._request.return_token_ids:
                extra["token_ids"] = delta.ids.tolist()
        if not change and not extra:
            return b""
        return self._chunk(delta.index, change, **extra)

    def choice(self, choice: Choice) -> bytes:
        calls = b""
        if choice.tool_calls:
            listed = [{"index": i, **call} for i, call in enumerate(_tool_calls(self._request, choice))]
            calls = self._chunk(choice.index, {"tool_calls": listed})
        return calls + self._chunk(choice.index, {}, finish_reason=choice.finish_reason)

    def finish(self, reply: Answer) -> bytes:
        extra: dict[str, Any] = {}
        if self._request.return_token_ids:
            extra["prompt_token_ids"] = reply.prompt_ids.tolist()
        if self._request.prompt_logprobs is not None:
            extra["prompt_logprobs"] = prompt_rows(reply.choices[0], self._request, self._rendering)
        usage = b""
        if self._request.include_usage or extra:
            usage = sse({**self._head, "choices": [], "usage": _usage(reply), **extra})
        return usage + b"data: [DONE]\n\n"

    def fail(self, refusal: Refusal) -> bytes:
        return sse(openai_error(refusal))

    def _chunk(self, index: int, delta: dict[str, Any], *, finish_reason: str | None = None, **extra: Any) -> bytes:
        choice = {"index": index, "delta": delta, "finish_reason": finish_reason, **extra}
        return sse({**self._head, "choices": [choice]})


def neutral_message(message: Any, where: str, reading: Reading) -> Message:
    """A chat message in neutral form."""
    role = reading.known(message, MESSAGES, where)
    content = text_of(message.get("content"), f"{where}.content", PARTS, reading)
    match role:
        case "system" | "developer":
            return {"role": "system", "content": content}
        case "user":
            return {"role": "user", "content": content}
        case "assistant":
            calls = _calls(message, where, reading)
            reasoning = message.get("reasoning_content") or message.get("reasoning")
            text = content or typed(message, "refusal", str, "")
            return assistant_message(text, calls, reasoning if isinstance(reasoning, str) else None)
        case "tool" | "function":
            neutral: Message = {"role": "tool", "content": content}
            return neutral | {k: message[k] for k in ("tool_call_id", "name") if isinstance(message.get(k), str)}
        case _:
            known = "system, developer, user, assistant or tool"
            role = message.get("role")
            words = f"'{where}.role' must be {known}, not {role!r}."
            words += (
                " This is a choice; its message goes there: answer.choices[0].message." if "message" in message else ""
            )
            raise Refusal(words, code="invalid_value", param=f"{where}.role")


def _begun(body: Body, messages: list[Message], reading: Reading) -> tuple[list[Message], str]:
    """The conversation, and what the client began the answer with, where it says that its last message is to go on."""
    name = "continue_final_message"
    if not typed(body, name, bool, False):
        if body.get("add_generation_prompt") is False:
            reading.unavailable("add_generation_prompt", f"it goes with {name}: true")
        return messages, ""
    messages, begun = begun_answer(messages, "messages")
    if not begun:
        raise Refusal(f"'{name}' needs a last message of the assistant.", code="invalid_value", param=name)
    return messages, begun


def _calls(message: Mapping[str, Any], where: str, reading: Reading) -> list[dict[str, Any]]:
    """The tool calls of an assistant's message; a `function_call` is one in the format that came before them."""
    calls = []
    for index, call in enumerate(typed(message, "tool_calls", list, [])):
        place = f"{where}.tool_calls[{index}]"
        kind = reading.known(call, CALLS, place)
        if kind == "custom":
            custom = required(call, "custom", dict, place)
            reading.check(custom, CUSTOM_CALLED, f"{place}.custom")
            called = {**custom, "id": call.get("id"), "input": arguments_of_text(custom.get("input"))}
            calls.append(sent_call(called, place, id="id", arguments="input"))
        elif kind is not None:
            function = required(call, "function", dict, place)
            reading.check(function, CALLED, f"{place}.function")
            calls.append(sent_call({**function, "id": call.get("id")}, place, id="id", arguments="arguments"))
    if not calls and (old := typed(message, "function_call", dict, {})):
        calls.append(sent_call(old, f"{where}.function_call", id="id", arguments="arguments"))
    return calls


def _tools(given: Sequence[Any], reading: Reading) -> ToolSet:
    """OpenAI's tools as functions, without the flags that address the API and not the model."""
    declared: list[Tool] = []
    strict: dict[str, str] = {}
    origins: dict[str, Origin] = {}
    for index, tool in enumerate(given):
        where = f"tools[{index}]"
        kind = reading.known(tool, TOOLS, where)
        if kind is None:
            continue
        if kind not in tool and "name" in tool:
            raise Refusal(
                f"'{where}' has the parts of a tool at its top, as in the Responses API. Chat Completions has them one "
                f"level down: {{'type': '{kind}', '{kind}': {{'name': {tool['name']!r:.60}, …}}}}.",
                code="invalid_type",
                param=where,
            )
        inner, fields = required(tool, kind, dict, where), CUSTOM if kind == "custom" else FUNCTION
        reading.check(inner, fields, f"{where}.{kind}")
        name = tool_name(inner, f"{where}.{kind}")
        if kind == "custom":
            declared.append(text_function(name, inner))
            origins[name] = Origin(kind, name)
            continue
        check_parameters(inner.get("parameters"), f"{where}.{kind}.parameters")
        if inner.get("strict") is True:
            strict[name] = f"{where}.parameters"
        kept = {k: v for k, v in inner.items() if k in FUNCTION.acting and k != "strict"}
        declared.append({"type": "function", "function": kept})
    return ToolSet(declared, strict, len(declared) == len(given), origins)


def _choice(request: CallRequest, choice: Choice, rendering: Rendering) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": choice.content or None, "refusal": None}
    if not choice.tool_calls:
        message["content"] = choice.content
    else:
        message["tool_calls"] = _tool_calls(request, choice)
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    logprobs = None
    if request.logprobs:
        logprobs = _logprobs(choice, request, rendering)
    found = {
        "index": choice.index,
        "message": message,
        "logprobs": logprobs,
        "finish_reason": choice.finish_reason,
    }
    if request.return_token_ids:
        found["token_ids"] = choice.ids.tolist()
    return found


def _tool_calls(request: CallRequest, choice: Choice) -> list[dict[str, Any]]:
    return [_tool_call(call, request.private or {}) for call in choice.tool_calls]


def _tool_call(call: ToolCall, origins: Mapping[str, Any]) -> dict[str, Any]:
    if origin_of(call, origins).kind == "custom":
        return {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": text_of_call(call.arguments)}}
    return neutral_call(call.id, call.name, call.arguments)


def _usage(reply: Answer) -> dict[str, Any]:
    prompt, completion = len(reply.prompt_ids), reply.response_tokens
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
    }


def _logprobs(tokens: Choice | Delta, request: CallRequest, rendering: Rendering) -> dict[str, Any]:
    return {"content": logprob_rows(tokens, request, rendering), "refusal": None}
