"""Traces that other tools recorded → conversations. Pure. They are text: without the tokens that a model sampled, they
serve supervised fine-tuning, preferences and prompts, and not reinforcement learning.

`TRACE_READERS` lists the kinds. A reader knows its kind by a value of JSON and gives the model calls or the whole
conversations in it. The calls of a trace become one conversation for each call that no other one continues, since every
call repeats what was said before it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

from agentlightning.adapter.conversations import message_of_parts
from agentlightning.adapter.matching import MessagePlaces, MessageTree
from agentlightning.adapter.numbered import below_numbers, numbered_messages, numbered_tools, read_json
from agentlightning.adapter.scores import (
    ImportedScore,
    calls_below_each,
    evaluations,
    langfuse_score,
    langfuse_scores,
    score_fields,
    scored_calls,
)

Message = dict[str, Any]
Example = dict[str, Any]
"""`messages` in the form of chat completions, and `tools` where there are any."""
_CHATS = ("chat", "text_completion", "generate_content")
_ALIASES = {"human": "user", "ai": "assistant", "model": "assistant", "function": "tool"}
"""Roles as LangChain and Google's clients name them."""
_ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ImportedCall:
    """A model call of a trace."""

    trace: str
    began: int
    """Nanoseconds since 1970; 0 where it is not known."""
    messages: Sequence[Message]
    answer: Message
    tools: Sequence[Any] = ()
    ident: str = ""
    """Its own id in the trace."""


@dataclass(slots=True)
class Imported:
    """What was found so far."""

    calls: list[ImportedCall] = field(default_factory=list)
    conversations: list[Example] = field(default_factory=list)
    others: int = 0
    """Records of a known kind that are no model calls: tools, agents, chains."""
    silent: int = 0
    """Model calls whose text was not recorded."""
    scores: dict[str, list[ImportedScore]] = field(default_factory=dict)
    """By trace."""
    parents: dict[str, dict[str, str]] = field(default_factory=dict)
    """What each thing of a trace is below, by trace and id."""
    other_scores: int = 0
    """Scores that are of no trace, and corrections."""

    def add_scores(self, found: Iterable[ImportedScore | None]) -> None:
        """Add scores, and count those that belong to no trace."""
        for score in found:
            if score is None:
                self.other_scores += 1
            else:
                self.scores.setdefault(score.trace, []).append(score)

    def add_parent(self, trace: str, ident: Any, parent: Any) -> None:
        """Note what something is below."""
        if ident and parent:
            self.parents.setdefault(trace, {})[str(ident)] = str(parent)

    def examples(self) -> list[Example]:
        """The conversations, those of calls after those that were whole already. Those that are scored have the fields
        `scores` and `score_comments`."""
        by_trace: dict[str, list[ImportedCall]] = {}
        for call in sorted(self.calls, key=lambda call: call.began):
            by_trace.setdefault(call.trace, []).append(call)
        ends = [one for trace, calls in by_trace.items() for one in self._ends(trace, calls)]
        return [*self.conversations, *ends]

    def _ends(self, trace: str, calls: Sequence[ImportedCall]) -> Iterator[Example]:
        """A conversation for each call of a trace that no other one goes on from. Clocks have no say in it: they step
        back. Two instruments may record the same call."""
        tree = MessageTree()
        firsts: dict[int, tuple[ImportedCall, MessagePlaces]] = {}
        idents: dict[int, set[str]] = {}
        for call in calls:
            places = tree.add(map(_compared, call.messages), _compared(call.answer))
            firsts.setdefault(places.end, (call, places))
            idents.setdefault(places.end, set()).add(call.ident)
        continued = {place for _, places in firsts.values() for place in places.prompt}
        scored = self._scored(trace, calls)
        for call, places in firsts.values():
            if places.end in continued:
                continue
            example = _example([*call.messages, call.answer], call.tools)
            if scored:
                parts = set().union(*(idents.get(place, ()) for place in (*places.prompt, places.end)))
                example |= score_fields([score for score, of in scored if not of.isdisjoint(parts)])
            yield example

    def unmatched_scores(self) -> int:
        """How many scores are of no model call that was found."""
        calls: dict[str, list[ImportedCall]] = {}
        for call in self.calls:
            calls.setdefault(call.trace, []).append(call)
        known = {trace: len(self._scored(trace, found)) for trace, found in calls.items()}
        return self.other_scores + sum(map(len, self.scores.values())) - sum(known.values())

    def _scored(self, trace: str, calls: Sequence[ImportedCall]) -> list[tuple[ImportedScore, set[str]]]:
        """The scores of a trace, with the calls that they are of."""
        idents, parents = {call.ident for call in calls}, self.parents.get(trace, {})
        below = calls_below_each(idents, parents) if trace in self.scores else {}
        found = [(score, scored_calls(score, idents, parents, below)) for score in self.scores.get(trace, ())]
        return [(score, scored) for score, scored in found if scored]


class TraceReader(NamedTuple):
    """A kind of trace."""

    name: str
    knows: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any], Imported], None]


def add_value(value: Any, found: Imported) -> None:
    """Add what a value of JSON holds: an object of a kind in `TRACE_READERS`, or a list of them. Raises ValueError,
    with what was found, where it is none."""
    if isinstance(value, list):
        for one in value:
            add_value(one, found)
        return
    if not isinstance(value, dict):
        raise ValueError(f"{json.dumps(value)[:60]} is no object")
    reader = next((reader for reader in TRACE_READERS if reader.knows(value)), None)
    if reader is None:
        kinds = ", ".join(reader.name for reader in TRACE_READERS)
        raise ValueError(f"an object with {', '.join(list(value)[:8]) or 'nothing in it'} is none of: {kinds}")
    try:
        reader.read(value, found)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"it is not what {reader.name} writes: {type(error).__name__}: {error}") from None


_DIGITS = 30
"""No count of nanoseconds has so many."""


def _nanoseconds(moment: Any) -> int:
    """A moment as traces write it: a count of nanoseconds since 1970, also as text, or a date of ISO 8601."""
    if isinstance(moment, int | float):
        return int(moment) if math.isfinite(moment) else 0
    text = str(moment)
    if text.isdecimal() and len(text) < _DIGITS:
        return int(text)
    try:
        date = datetime.fromisoformat(text)
    except ValueError:
        return 0
    date = date if date.tzinfo else date.replace(tzinfo=UTC)
    return (date - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1) * 1000


def _compared(message: Message) -> str:
    """A message as it is compared: an absent content is an empty one, and what only answers have does not count."""
    calls = [(c.get("id"), c.get("function", {}).get("name")) for c in message.get("tool_calls") or ()]
    places = message["role"], message.get("content") or "", calls, message.get("tool_call_id")
    return json.dumps(places, sort_keys=True)


def _example(messages: Sequence[Message], tools: Sequence[Any]) -> Example:
    named = [{**message, "role": _ALIASES.get(message["role"], message["role"])} for message in messages]
    whole = [tool for tool in tools if isinstance(tool, dict)]
    return {"messages": named, **({"tools": whole} if whole else {})}


# ---- ATIF ------------------------------------------------------------------------------------------------------------


def _atif(trajectory: Mapping[str, Any], found: Imported) -> None:
    messages: list[Message] = []
    for step in trajectory["steps"]:
        messages.extend(_step(step))
    while messages and messages[-1]["role"] != "assistant":
        messages.pop()
    if messages:
        found.conversations.append(_example(messages, trajectory["agent"].get("tool_definitions") or ()))
    for embedded in trajectory.get("subagent_trajectories") or ():
        _atif(embedded, found)


def _step(step: Mapping[str, Any]) -> Iterator[Message]:
    """A step's message, and the results of its tools. An answer that was copied from elsewhere is context alone."""
    agent = step["source"] == "agent"
    message: Message = {"role": "assistant" if agent else step["source"], "content": step.get("message") or ""}
    made = step.get("tool_calls") or ()
    if made:
        message["tool_calls"] = [_called(c["tool_call_id"], c["function_name"], c.get("arguments")) for c in made]
    if agent and step.get("is_copied_context"):
        message["weight"] = 0
    yield message
    for number, result in enumerate((step.get("observation") or {}).get("results") or ()):
        which = result.get("source_call_id") or (made[number]["tool_call_id"] if number < len(made) else None)
        content = result.get("content") or ""
        yield (
            {"role": "tool", "content": content, "tool_call_id": which}
            if which
            else {
                "role": "user",
                "content": content,
            }
        )


def _called(ident: Any, name: Any, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": text}}


# ---- OpenTelemetry and OpenInference ---------------------------------------------------------------------------------


def _otlp(request: Mapping[str, Any], found: Imported) -> None:
    for resource in request.get("resourceSpans") or request.get("resource_spans") or ():
        for scope in resource.get("scopeSpans") or resource.get("scope_spans") or ():
            for span in scope.get("spans") or ():
                _otlp_span(span, found)


def _otlp_span(span: Mapping[str, Any], found: Imported) -> None:
    events = [(e.get("name", ""), _attributes(e.get("attributes"))) for e in span.get("events") or ()]
    began = _nanoseconds(span.get("startTimeUnixNano"))
    trace, ident = str(span.get("traceId")), str(span.get("spanId"))
    found.add_parent(trace, ident, span.get("parentSpanId"))
    _span(trace, ident, began, _attributes(span.get("attributes")), events, found)


def _sdk_span(span: Mapping[str, Any], found: Imported) -> None:
    """As the SDK of Python prints a span, and as Phoenix gives it."""
    events = [(e.get("name", ""), dict(e.get("attributes") or {})) for e in span.get("events") or ()]
    attributes = {**_flat(span.get("attributes") or {})}
    if span.get("span_kind"):
        attributes.setdefault("openinference.span.kind", span["span_kind"])
    trace, ident = str(span["context"].get("trace_id")), str(span["context"].get("span_id"))
    found.add_parent(trace, ident, span.get("parent_id"))
    _span(trace, ident, _nanoseconds(span.get("start_time")), attributes, events, found)


def _attributes(pairs: Any) -> dict[str, Any]:
    """The attributes of OTLP's JSON, a list of keys and typed values, or a plain object."""
    return dict(pairs) if isinstance(pairs, dict) else {p["key"]: _typed(p.get("value") or {}) for p in pairs or ()}


def _typed(value: Mapping[str, Any]) -> Any:
    if "arrayValue" in value:
        return [_typed(one) for one in value["arrayValue"].get("values") or ()]
    if "kvlistValue" in value:
        return _attributes(value["kvlistValue"].get("values"))
    return next(iter(value.values()), None)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Attributes with dots in their names: Phoenix nests them. A list of objects gets numbers."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if isinstance(value, list) and value and all(isinstance(one, dict) for one in value) and "gen_ai" not in name:
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, dict) and value and not name.startswith(("gen_ai.", "metadata")):
            flat |= _flat(value, f"{name}.")
        else:
            flat[name] = value
    return flat


def _span(
    trace: str,
    ident: str,
    began: int,
    attributes: Mapping[str, Any],
    events: Sequence[tuple[str, Mapping[str, Any]]],
    found: Imported,
) -> None:
    found.add_scores(evaluations(events, trace, ident))
    if not _is_call(attributes):
        found.others += 1
        return
    for read in (_by_parts, _by_numbers, _by_openinference, _by_events, _by_values):
        messages, answer = read(attributes, events)
        if answer is not None:
            tools = _json(attributes.get("gen_ai.tool.definitions"), ()) or numbered_tools(attributes)
            found.calls.append(ImportedCall(trace, began, messages, answer, tools or _tools(attributes), ident))
            return
    found.silent += 1


def _is_call(attributes: Mapping[str, Any]) -> bool:
    operation = attributes.get("gen_ai.operation.name")
    kind = attributes.get("openinference.span.kind") or attributes.get("langfuse.observation.type")
    if operation is not None or kind is not None:
        return operation in _CHATS or str(kind).upper() in ("LLM", "GENERATION")
    return any(name.startswith(("gen_ai.request.model", "gen_ai.prompt", "gen_ai.input")) for name in attributes)


Read = tuple[list[Message], Message | None]
Events = Sequence[tuple[str, Mapping[str, Any]]]


def _by_parts(attributes: Mapping[str, Any], _: Events) -> Read:
    """The messages of the GenAI conventions, as a value or as its JSON."""
    messages = [message_of_parts(m) for m in _json(attributes.get("gen_ai.input.messages"), ())]
    answers = [message_of_parts(m) for m in _json(attributes.get("gen_ai.output.messages"), ())]
    instructions = _json(attributes.get("gen_ai.system_instructions"), ())
    if instructions and not any(message["role"] == "system" for message in messages):
        messages.insert(0, message_of_parts({"role": "system", "parts": instructions}))
    return messages, answers[0] if answers else None


def _by_numbers(attributes: Mapping[str, Any], _: Events) -> Read:
    answers = numbered_messages(attributes, "gen_ai.completion")
    return numbered_messages(attributes, "gen_ai.prompt"), answers[0] if answers else None


def _by_openinference(attributes: Mapping[str, Any], _: Events) -> Read:
    answers = _openinference(attributes, "llm.output_messages")
    return _openinference(attributes, "llm.input_messages"), answers[0] if answers else None


def _by_events(_: Mapping[str, Any], events: Events) -> Read:
    """The events of conventions up to 1.36: `gen_ai.user.message` and its like, and `gen_ai.choice`."""
    messages: list[Message] = []
    answer: Message | None = None
    for name, attributes in events:
        body = {**attributes, **_json(attributes.get("message"), {})}
        role = name.removeprefix("gen_ai.").removesuffix(".message")
        if name == "gen_ai.choice":
            answer = answer or _chat({**body, "role": "assistant"})
        elif role in _ROLES:
            given = {"tool_call_id": body.get("id")} if role == "tool" else {}
            messages.append(_chat({**given, **body, "role": body.get("role") or role}))
    return messages, answer


def _by_values(attributes: Mapping[str, Any], _: Events) -> Read:
    """What was written as one value: Langfuse's attributes, and those that OpenInference falls back to."""
    names = (("langfuse.observation.input", "langfuse.observation.output"), ("input.value", "output.value"))
    for given, answered in names:
        if attributes.get(answered) is not None:
            return _conversation_in(attributes.get(given))[0], _answered(attributes[answered])
    return [], None


def _openinference(attributes: Mapping[str, Any], prefix: str) -> list[Message]:
    messages: list[Message] = []
    for below in below_numbers(attributes, prefix, "message."):
        texts = [part.get("text") or "" for part in below_numbers(below, "contents", "message_content.")]
        calls = [
            _called(call.get("id"), call.get("function.name"), call.get("function.arguments"))
            for call in below_numbers(below, "tool_calls", "tool_call.")
        ]
        message: Message = {"role": below.get("role", "user"), "content": below.get("content") or "".join(texts)}
        named = {"tool_calls": calls} if calls else {}
        if below.get("tool_call_id"):
            named["tool_call_id"] = below["tool_call_id"]
        messages.append({**message, **named})
    return messages


def _tools(attributes: Mapping[str, Any]) -> list[Any]:
    """The tools that Langfuse or OpenInference write."""
    written = _conversation_in(attributes.get("langfuse.observation.input"))[1]
    tools = written or [_json(b.get("json_schema"), {}) for b in below_numbers(attributes, "llm.tools", "tool.")]
    return [tool for tool in tools if tool]


# ---- Langfuse --------------------------------------------------------------------------------------------------------


def _langfuse(observation: Mapping[str, Any], found: Imported) -> None:
    trace, ident = str(observation.get("traceId")), str(observation.get("id") or "")
    found.add_parent(trace, ident, observation.get("parentObservationId"))
    found.add_scores(langfuse_scores(observation.get("scores"), trace, ident))
    if str(observation.get("type")).upper() != "GENERATION":
        found.others += 1
        return
    answer = None if observation.get("output") is None else _answered(observation["output"])
    if answer is None or observation.get("input") is None:
        found.silent += 1
        return
    messages, tools = _conversation_in(observation["input"])
    began = _nanoseconds(observation.get("startTime"))
    found.calls.append(ImportedCall(trace, began, messages, answer, tools, ident))


def _langfuse_trace(trace: Mapping[str, Any], found: Imported) -> None:
    for observation in trace["observations"]:
        _langfuse({"traceId": trace.get("id"), **observation}, found)
    found.add_scores(langfuse_scores(trace.get("scores"), trace.get("id")))


def _langfuse_score(score: Mapping[str, Any], found: Imported) -> None:
    found.add_scores([langfuse_score(score)])


def _conversation_in(value: Any) -> tuple[list[Message], Sequence[Any]]:
    """The messages and tools of an input: a list of messages, an object with them, one message, or text."""
    value = _json(value, value)
    if isinstance(value, dict) and isinstance(value.get("messages"), list):
        return _conversation_in(value["messages"])[0], value.get("tools") or ()
    if isinstance(value, list) and all(isinstance(m, dict) and _is_role(m.get("role")) for m in value):
        return [_chat(message) for message in value], ()
    if isinstance(value, dict) and _is_role(value.get("role")):
        return [_chat(value)], ()
    return [{"role": "user", "content": value if isinstance(value, str) else json.dumps(value)}], ()


def _is_role(name: Any) -> bool:
    return isinstance(name, str) and (name in _ROLES or name in _ALIASES)


def _answered(value: Any) -> Message:
    """The answer of an output: a message, a whole response, a list of one, or text."""
    value = _json(value, value)
    if isinstance(value, dict) and value.get("choices"):
        value = value["choices"][0].get("message") or ""
    if isinstance(value, list) and value:
        value = value[-1]
    if isinstance(value, dict) and ("content" in value or "tool_calls" in value):
        return _chat({**value, "role": "assistant"})
    return {"role": "assistant", "content": value if isinstance(value, str) else json.dumps(value)}


def _chat(message: Mapping[str, Any]) -> Message:
    """A message in the form of chat completions, with the fields of that form alone."""
    if "parts" in message:
        return message_of_parts(message)
    plain: Message = {"role": message["role"], "content": message.get("content") or ""}
    if calls := _json(message.get("tool_calls"), ()):
        made = [(c.get("id"), c.get("function") or c) for c in calls]
        plain["tool_calls"] = [_called(ident, named["name"], named.get("arguments")) for ident, named in made]
    if message.get("tool_call_id"):
        plain["tool_call_id"] = message["tool_call_id"]
    return plain


def _json(value: Any, default: Any) -> Any:
    """A value that may be written as JSON; `default` where it is absent, or a text that is not JSON."""
    if isinstance(value, str):
        return read_json(value, default)
    return default if value is None else value


# ---- the kinds -------------------------------------------------------------------------------------------------------


def _page(page: Mapping[str, Any], found: Imported) -> None:
    add_value(page["data"], found)


def _lists(key: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda value: isinstance(value.get(key), list)


TRACE_READERS: Sequence[TraceReader] = (
    TraceReader("ATIF", lambda value: str(value.get("schema_version", "")).startswith("ATIF"), _atif),
    TraceReader("OTLP", lambda value: "resourceSpans" in value or "resource_spans" in value, _otlp),
    TraceReader("a span of OTLP", lambda value: "spanId" in value and "traceId" in value, _otlp_span),
    TraceReader(
        "a span of OpenTelemetry or Phoenix",
        lambda value: isinstance(value.get("context"), dict) and "attributes" in value,
        _sdk_span,
    ),
    TraceReader("a trace of Langfuse", _lists("observations"), _langfuse_trace),
    TraceReader("a score of Langfuse", lambda value: "dataType" in value and "name" in value, _langfuse_score),
    TraceReader("an observation of Langfuse", lambda value: "traceId" in value and "type" in value, _langfuse),
    TraceReader("a page of an API", _lists("data"), _page),
)
"""Which kinds are known, in the order in which they are tried."""
