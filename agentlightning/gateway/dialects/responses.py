"""OpenAI Responses, stateful: a request may name an earlier response of its attempt and send only what is new."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.dialects.base import (
    Answered,
    Body,
    Dialect,
    Kinds,
    StreamWriter,
    logprob_rows,
    openai_error,
    sse,
)
from agentlightning.gateway.dialects.fields import (
    Reading,
    ToolSet,
    assistant_message,
    between,
    given_settings,
    json_schema_of,
    required,
    sent_call,
    text_of,
    tool_choice_of,
    tool_name,
    typed,
)
from agentlightning.gateway.dialects.tables.responses import (
    FIELDS,
    IN_NAMESPACE,
    ITEMS,
    NESTED,
    PARTS,
    REASONING,
    TEXT,
    TOOLS,
)
from agentlightning.gateway.dialects.template import effort_of
from agentlightning.gateway.dialects.tools import (
    Origin,
    arguments_of_text,
    check_parameters,
    flat_name,
    origin_of,
    text_function,
    text_of_call,
)
from agentlightning.gateway.exchange import Answer, CallRequest, Choice, Delta, Refusal, ToolCall
from agentlightning.gateway.sampling.settings import check_settings
from agentlightning.reading import whole_number
from agentlightning.rendering import Rendering
from agentlightning.rendering.messages import Message, Tool

SETTINGS = {"temperature": "temperature", "top_p": "top_p", "max_output_tokens": "max_tokens"}

_CALLS = {"function": "function_call", "custom": "custom_tool_call"}
"""The items that call tools of these kinds."""
_DELTA_FIELDS = {"function_call": "arguments", "custom_tool_call": "input"}
"""Where such an item has what the tool is called with."""
_ID_LENGTH = 32
"""Of what is random in a response's id (`uuid4().hex`)."""
_ENDS = ("response.completed", "response.incomplete")
_LOGPROBS = "message.output_text.logprobs"


class ResponsesDialect(Dialect):
    """`POST /responses`."""

    name = "responses"
    title = "Responses"
    paths = ("/responses",)
    id_prefix = "resp_"
    fields = FIELDS
    nested = NESTED
    client_params = "openai.types.responses.response_create_params:ResponseCreateParamsNonStreaming"
    conversation_fields = ("input", "instructions", "tools")
    refers = re.compile(rb'"(?:resp|rs|msg|fc|ctc)_([0-9a-f]{%d})[0-9]*"' % _ID_LENGTH)

    def parse(self, body: Body, answered: Answered) -> CallRequest:
        reading = Reading()
        reading.check(body, FIELDS)
        messages = [*_earlier(body, answered), *neutral_messages(_resolved(body.get("input"), answered), reading)]
        if not messages:
            raise Refusal("'input' is empty.", code="invalid_value", param="input")
        instructions = typed(body, "instructions", str, "")
        tools = _tools(typed(body, "tools", list, []), reading)
        logprobs = _LOGPROBS in typed(body, "include", list, [])
        if body.get("top_logprobs") and not logprobs:
            reading.unavailable("top_logprobs", f"it needs {_LOGPROBS} in 'include'")
        text = typed(body, "text", dict, {})
        reading.check(text, TEXT, "text")
        reasoning = typed(body, "reasoning", dict, {})
        reading.check(reasoning, REASONING, "reasoning")
        settings = given_settings(body, SETTINGS)
        check_settings(settings)
        return CallRequest(
            dialect=self.name,
            model=required(body, "model", str),
            messages=[{"role": "system", "content": instructions}, *messages] if instructions else messages,
            tools=tools.declared or None,
            tool_choice=tool_choice_of(body.get("tool_choice"), tools, reading),
            strict=tools.strict,
            parallel_tool_calls=typed(body, "parallel_tool_calls", bool, True),
            stream=typed(body, "stream", bool, False),
            logprobs=logprobs,
            top_logprobs=between(body, "top_logprobs", 0, 0, 20),
            schema=json_schema_of(text.get("format"), "text.format", reading),
            asked=settings,
            template=effort_of(reasoning, "effort", "reasoning.effort"),
            left_out=reading.left_out,
            remember=messages if typed(body, "store", bool, True) else None,
            private={"body": {k: v for k, v in body.items() if k != "input"}, "origins": tools.origins},
        )

    def respond(self, request: CallRequest, reply: Answer, rendering: Rendering) -> bytes:
        choice = reply.choices[0]
        items = _items(choice, reply.response_id, request, rendering)
        head = _head(request, reply.response_id, reply.created)
        return msgspec.json.encode({**head, **_end(choice), "output": items, "usage": _usage(reply)})

    def writer(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> StreamWriter:
        return _ResponsesWriter(request, response_id, created, rendering)

    def refuse(self, refusal: Refusal) -> bytes:
        return msgspec.json.encode(openai_error(refusal))

    def answer_message(self, answer: Body) -> Message | None:
        return neutral_messages(answer["output"], Reading())[-1]

    def gather(self, events: Sequence[Body]) -> dict[str, Any]:
        return next((e["response"] for e in reversed(events) if e.get("type") in _ENDS), {})


class _ResponsesWriter:
    """The events of a response: items open and close in the order of the output, each text part between its own."""

    def __init__(self, request: CallRequest, response_id: str, created: int, rendering: Rendering) -> None:
        self._request = request
        self._rendering = rendering
        self._id = response_id
        self._head = _head(request, response_id, created)
        self._number = 0
        self._items: list[dict[str, Any]] = []
        self._open: str | None = None
        self._text = ""

    def start(self, prompt_tokens: int) -> bytes:
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, delta: Delta) -> bytes:
        out = b""
        if delta.reasoning:
            out += self._into("reasoning") + self._add("response.reasoning_text.delta", delta.reasoning)
        if delta.content:
            out += self._into("message") + self._add("response.output_text.delta", delta.content, logprobs=[])
        return out

    def choice(self, choice: Choice) -> bytes:
        out = self._close()
        whole = _items(choice, self._id, self._request, self._rendering)
        for item in whole[len(self._items) :]:
            at = len(self._items)
            delta_field = _DELTA_FIELDS.get(item["type"])
            empty = {**item, "status": "in_progress", **({delta_field: ""} if delta_field else {})}
            out += self._event("response.output_item.added", output_index=at, item=empty)
            if delta_field:
                place = {"item_id": item["id"], "output_index": at}
                named = {"name": item["name"]} if delta_field == "arguments" else {}
                out += self._event(f"response.{item['type']}_{delta_field}.delta", **place, delta=item[delta_field])
                out += self._event(
                    f"response.{item['type']}_{delta_field}.done",
                    **place,
                    **{delta_field: item[delta_field]},
                    **named,
                )
            out += self._event("response.output_item.done", output_index=at, item=item)
            self._items.append(item)
        return out

    def finish(self, reply: Answer) -> bytes:
        choice = reply.choices[0]
        end = _end(choice)
        response = {
            **self._head,
            **end,
            "output": _items(choice, self._id, self._request, self._rendering),
            "usage": _usage(reply),
        }
        return self._event(f"response.{end['status']}", response=response)

    def fail(self, refusal: Refusal) -> bytes:
        return self._event("error", code=refusal.wire_code, message=refusal.message, param=refusal.param)

    def _event(self, kind: str, **fields: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return sse({"type": kind, "sequence_number": number, **fields}, kind)

    def _into(self, kind: str) -> bytes:
        """Make an item of this kind the open one."""
        if self._open == kind:
            return b""
        out = self._close()
        self._open, self._text = kind, ""
        item = _text_item(kind, self._id, None)
        part = {"item_id": item["id"], "output_index": len(self._items), "content_index": 0, "part": _part(kind, "")}
        out += self._event("response.output_item.added", output_index=len(self._items), item=item)
        return out + self._event("response.content_part.added", **part)

    def _add(self, kind: str, text: str, **more: Any) -> bytes:
        self._text += text
        return self._event(kind, **self._place(), delta=text, **more)

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        return {"item_id": _item_id(self._open, self._id), "output_index": len(self._items), "content_index": 0}

    def _close(self) -> bytes:
        kind = self._open
        if kind is None:
            return b""
        place, item = self._place(), _text_item(kind, self._id, self._text)
        done = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
        out = self._event(done, **place, text=self._text, **({"logprobs": []} if kind == "message" else {}))
        out += self._event("response.content_part.done", **place, part=_part(kind, self._text))
        out += self._event("response.output_item.done", output_index=len(self._items), item=item)
        self._items.append(item)
        self._open = None
        return out


# ---- requests ------------------------------------------------------------------------------------------------------


def _earlier(body: Mapping[str, Any], answered: Answered) -> Sequence[Message]:
    """The messages of the response that the request continues."""
    previous = typed(body, "previous_response_id", str, "")
    if not previous:
        return ()
    if previous not in answered:
        raise _gone(f"Previous response with id '{previous[:100]}'", "previous_response_id", "previous_response")
    return answered[previous]


def _gone(what: str, param: str, code: str) -> Refusal:
    return Refusal(
        f"{what} not found: it was made with store=false, belongs to another attempt or to a client with another "
        "key, or is too old. Send the conversation itself in 'input'.",
        code=f"{code}_not_found",
        param=param,
    )


def _resolved(given: Any, answered: Answered) -> Any:
    """Input items with those that are references to earlier output items in place of the references."""
    if not isinstance(given, list):
        return given
    return [
        _referred(item, f"input[{index}]", answered) if _is_reference(item) else item
        for index, item in enumerate(given)
    ]


def _is_reference(item: Any) -> bool:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return False
    return item.get("type") == "item_reference" or ("type" not in item and "role" not in item)


def _referred(item: Mapping[str, Any], where: str, answered: Answered) -> dict[str, Any]:
    """The item that a reference means. An id says of which answer it is a part, and of which kind (`_item_id`)."""
    prefix, _, rest = item["id"].partition("_")
    response_id, number = f"resp_{rest[:_ID_LENGTH]}", rest[_ID_LENGTH:]
    which = whole_number(number)
    if rest and response_id in answered and (number == "" or which is not None):
        answer = answered[response_id][-1]
        calls = answer.get("tool_calls", ())
        match prefix:
            case "rs" if answer.get("reasoning_content"):
                return {"type": "reasoning", "content": [_part("reasoning", answer["reasoning_content"])]}
            case "msg" if not number:
                return {"type": "message", "role": "assistant", "content": answer["content"]}
            case "fc" | "ctc" if which is not None and which < len(calls):
                call = calls[which]
                return {"type": "function_call", "call_id": call["id"], **call["function"]}
            case _:
                pass
    raise _gone(f"Item with id '{item['id'][:100]}'", where, "item")


def neutral_messages(given: Any, reading: Reading) -> list[Message]:
    """Input items as neutral messages. Items that one response gave are one assistant message again."""
    if given is None:
        return []
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise Refusal("'input' must be a string or a list of items.", code="invalid_type", param="input")
    messages: list[Message] = []
    turn: dict[str, Any] | None = None  # the parts of the assistant message that is being put together
    for index, item in enumerate(given):
        where = f"input[{index}]"
        kind = reading.known(item, ITEMS, where)
        if kind is None:
            continue
        part = _assistant_part(item, kind, where, reading)
        if part is None:
            turn = None
            messages.append(_message(item, kind, where, reading))
            continue
        if turn is None or _begins_anew(turn, part):
            turn = {"content": "", "calls": [], "reasoning": ""}
            messages.append({})
        turn["content"] += part.get("content", "")
        turn["calls"] += part.get("calls", [])
        turn["reasoning"] += part.get("reasoning", "")
        messages[-1] = assistant_message(turn["content"], turn["calls"], turn["reasoning"])
    return messages


def _assistant_part(item: Mapping[str, Any], kind: str, where: str, reading: Reading) -> dict[str, Any] | None:
    """What an item adds to an assistant message; None if it is another message."""
    if kind == "reasoning":
        parts = item.get("content") or item.get("summary") or []
        return {"reasoning": text_of(parts, where, PARTS, reading)}
    if kind == "function_call":
        called = {**item, "name": flat_name(item.get("namespace"), item.get("name"))}
        return {"calls": [sent_call(called, where, id="call_id", arguments="arguments")]}
    if kind == "custom_tool_call":
        name = flat_name(item.get("namespace"), item.get("name"))
        called = {**item, "name": name, "input": arguments_of_text(item.get("input"))}
        return {"calls": [sent_call(called, where, id="call_id", arguments="input")]}
    if kind == "message" and item.get("role") == "assistant":
        return {"content": text_of(item.get("content"), f"{where}.content", PARTS, reading)}
    return None


def _begins_anew(turn: Mapping[str, Any], part: Mapping[str, Any]) -> bool:
    """A response's items come as reasoning, message, calls; going back in that order begins another response."""
    if part.get("reasoning"):
        return bool(turn["content"] or turn["calls"])
    return "content" in part and bool(turn["content"] or turn["calls"])


def _message(item: Mapping[str, Any], kind: str, where: str, reading: Reading) -> Message:
    if kind in ("function_call_output", "custom_tool_call_output"):
        text = text_of(item.get("output"), f"{where}.output", PARTS, reading)
        return {"role": "tool", "content": text, "tool_call_id": str(item.get("call_id", ""))}
    role = item.get("role")
    if role not in ("user", "system", "developer"):
        known = "system, developer, user or assistant"
        raise Refusal(f"'{where}.role' must be {known}, not {role!r}.", code="invalid_value", param=f"{where}.role")
    text = text_of(item.get("content"), f"{where}.content", PARTS, reading)
    return {"role": "user" if role == "user" else "system", "content": text}


def _tools(given: Sequence[Any], reading: Reading) -> ToolSet:
    """The tools as functions, those of a namespace one by one."""
    declared: list[Tool] = []
    strict: dict[str, str] = {}
    origins: dict[str, Origin] = {}
    whole = True

    def add(tool: Any, kinds: Kinds, where: str, namespace: str | None = None) -> None:
        nonlocal whole
        kind = reading.known(tool, kinds, where)
        if kind is None:
            whole = False
            return
        name = tool_name(tool, where)
        if kind == "namespace":
            for index, inner in enumerate(typed(tool, "tools", list, [])):
                add(inner, IN_NAMESPACE, f"{where}.tools[{index}]", name)
            return
        flat = flat_name(namespace, name)
        if kind == "custom":
            declared.append(text_function(flat, tool))
        else:
            check_parameters(tool.get("parameters"), f"{where}.parameters")
            kept = {k: v for k, v in tool.items() if k in ("description", "parameters") and v}
            declared.append({"type": "function", "function": {"name": flat, **kept}})
        if kind == "custom" or namespace is not None:
            origins[flat] = Origin(kind, name, namespace)
        if tool.get("strict") is True:
            strict[flat] = f"{where}.parameters"

    for index, tool in enumerate(given):
        add(tool, TOOLS, f"tools[{index}]")
    return ToolSet(declared, strict, whole, origins)


# ---- replies -------------------------------------------------------------------------------------------------------


def _head(request: CallRequest, response_id: str, created: int) -> dict[str, Any]:
    body: Mapping[str, Any] = request.private["body"]
    return {
        "id": response_id,
        "object": "response",
        "created_at": created,
        "model": request.model,
        "error": None,
        "incomplete_details": None,
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": request.parallel_tool_calls,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": {"effort": None, "summary": None},
        "store": request.remember is not None,
        "temperature": body.get("temperature"),
        "text": {"format": {"type": "text"}, **(body.get("text") or {})},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": "disabled",
    }


def _end(choice: Choice) -> dict[str, Any]:
    if choice.finish_reason == "length":
        return {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
    return {"status": "completed", "completed_at": int(time.time())}


def _items(choice: Choice, response_id: str, request: CallRequest, rendering: Rendering) -> list[dict[str, Any]]:
    """The output items of a choice: reasoning, message, calls."""
    items = []
    if choice.reasoning:
        items.append(_text_item("reasoning", response_id, choice.reasoning))
    if choice.content or not choice.tool_calls:
        logprobs = logprob_rows(choice, request, rendering) if request.logprobs else []
        items.append(_text_item("message", response_id, choice.content, logprobs))
    for number, call in enumerate(choice.tool_calls):
        items.append(_call(call, number, response_id, request.private["origins"]))
    return items


def _call(call: ToolCall, number: int, response_id: str, origins: Mapping[str, Any]) -> dict[str, Any]:
    """A call as the kind of item that its client's declaration of the tool asks for."""
    origin = origin_of(call, origins)
    kind = _CALLS[origin.kind]
    text = text_of_call(call.arguments) if origin.kind == "custom" else call.arguments
    item = {
        "type": kind,
        "id": f"{_item_id(kind, response_id)}{number}",
        "call_id": call.id,
        "name": origin.name,
        _DELTA_FIELDS[kind]: text,
        "status": "completed",
    }
    return item if origin.namespace is None else {**item, "namespace": origin.namespace}


def _item_id(kind: str, response_id: str) -> str:
    prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc", "custom_tool_call": "ctc"}[kind]
    return f"{prefix}_{response_id.partition('_')[2]}"


def _text_item(kind: str, response_id: str, text: str | None, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    """A reasoning or message item; with `text` None, one that has just begun."""
    item: dict[str, Any] = {"type": kind, "id": _item_id(kind, response_id)}
    item["status"] = "in_progress" if text is None else "completed"
    item["content"] = [] if text is None else [_part(kind, text, logprobs)]
    return item | ({"role": "assistant"} if kind == "message" else {"summary": []})


def _part(kind: str, text: str, logprobs: Sequence[Any] = ()) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _usage(reply: Answer) -> dict[str, Any]:
    prompt, response = len(reply.prompt_ids), reply.response_tokens
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": reply.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": response,
        "output_tokens_details": {"reasoning_tokens": reply.reasoning_tokens},
        "total_tokens": prompt + response,
    }
