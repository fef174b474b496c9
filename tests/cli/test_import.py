"""`agl import`: what other tools recorded becomes conversations, each kind the same; what cannot be read is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from typer.testing import CliRunner

from agentlightning.adapter.imports import TRACE_READERS
from agentlightning.cli.app import app
from agentlightning.errors import ConfigError

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
WHOLE: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "2."},
]
"""What every kind below holds, as two model calls of which the second goes on from the first."""
CALLS = (WHOLE[:3], WHOLE)


def parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message as the GenAI conventions write it."""
    if message["role"] == "tool":
        said = [{"type": "tool_call_response", "id": message["tool_call_id"], "response": message["content"]}]
    else:
        said = [{"type": "text", "content": message["content"]}] if message.get("content") else []
    if "tool_calls" in message:
        arguments = json.loads(CALL["function"]["arguments"])
        said.append({"type": "tool_call", "id": "c1", "name": "add", "arguments": arguments})
    return {"role": message["role"], "parts": said}


def of_conventions(call: list[dict[str, Any]]) -> dict[str, Any]:
    messages = [parts(message) for message in call]
    return {
        "gen_ai.operation.name": "chat",
        "gen_ai.system_instructions": json.dumps(messages[0]["parts"]),
        "gen_ai.input.messages": json.dumps(messages[1:-1]),
        "gen_ai.output.messages": json.dumps(messages[-1:]),
        "gen_ai.tool.definitions": json.dumps([TOOL]),
    }


def of_openinference(call: list[dict[str, Any]]) -> dict[str, Any]:
    attributes: dict[str, Any] = {
        "openinference.span.kind": "LLM",
        "llm.tools.0.tool.json_schema": json.dumps(TOOL),
        "input.value": "not this",
        "output.value": "nor this",
    }
    for prefix, messages in (("llm.input_messages", call[:-1]), ("llm.output_messages", call[-1:])):
        for number, message in enumerate(messages):
            at = f"{prefix}.{number}.message"
            attributes |= {f"{at}.{k}": v for k, v in message.items() if k in ("role", "content", "tool_call_id")}
            if "tool_calls" in message:
                attributes |= {
                    f"{at}.tool_calls.0.tool_call.id": "c1",
                    f"{at}.tool_calls.0.tool_call.function.name": "add",
                    f"{at}.tool_calls.0.tool_call.function.arguments": CALL["function"]["arguments"],
                }
    return attributes


def of_numbers(call: list[dict[str, Any]]) -> dict[str, Any]:
    """As OpenLLMetry writes it."""
    attributes: dict[str, Any] = {"gen_ai.operation.name": "chat", "llm.request.functions.0.name": "add"}
    attributes["llm.request.functions.0.parameters"] = '{"type": "object"}'
    for prefix, messages in (("gen_ai.prompt", call[:-1]), ("gen_ai.completion", call[-1:])):
        for number, message in enumerate(messages):
            at = f"{prefix}.{number}"
            attributes |= {f"{at}.{k}": v for k, v in message.items() if k in ("role", "content", "tool_call_id")}
            if "tool_calls" in message:
                attributes |= {f"{at}.tool_calls.0.id": "c1", f"{at}.tool_calls.0.name": "add"}
                attributes[f"{at}.tool_calls.0.arguments"] = CALL["function"]["arguments"]
    return attributes


def as_events(call: list[dict[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
    """As the conventions up to 1.36 write a call."""
    events: list[tuple[str, dict[str, Any]]] = []
    for message in call[:-1]:
        body = {"content": message.get("content", "")}
        if "tool_calls" in message:
            body["tool_calls"] = json.dumps(message["tool_calls"])
        if message["role"] == "tool":
            body["id"] = message["tool_call_id"]
        events.append((f"gen_ai.{message['role']}.message", body))
    return [*events, ("gen_ai.choice", {"index": 0, "message": json.dumps(call[-1])})]


def recorded(attributes: Callable[[list[dict[str, Any]]], dict[str, Any]], events: Any = lambda call: ()) -> list[Any]:
    """The spans of the SDK itself: an agent's, and its two calls below it."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("agent", attributes={"gen_ai.operation.name": "invoke_agent"}):
        for call in CALLS:
            with tracer.start_as_current_span("chat", attributes=attributes(call)) as span:
                for name, body in events(call):
                    span.add_event(name, body)
    return list(exporter.get_finished_spans())


def lines_of_sdk(spans: list[Any]) -> str:
    return "\n".join(json.dumps(json.loads(span.to_json())) for span in spans)


def otlp(spans: list[Any]) -> str:
    return json.dumps(MessageToDict(encode_spans(spans)))


def nested(flat: dict[str, Any]) -> dict[str, Any]:
    """Attributes as Phoenix's client gives them: objects for dots, lists for numbers."""
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        at, keys = tree, name.split(".")
        for key in keys[:-1]:
            at = at.setdefault(key, {})
        at[keys[-1]] = value

    def lists(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        if value and all(key.isdecimal() for key in value):
            return [lists(value[key]) for key in sorted(value, key=int)]
        return {key: lists(one) for key, one in value.items()}

    return lists(tree)


def phoenix() -> str:
    spans = [
        {
            "name": "chat",
            "context": {"trace_id": "t", "span_id": str(number)},
            "span_kind": "LLM",
            "start_time": f"2026-01-01T00:00:0{number}Z",
            "attributes": nested(of_openinference(call)),
        }
        for number, call in enumerate(CALLS)
    ]
    return json.dumps({"data": spans, "next_cursor": None})


def langfuse(**changed: Any) -> list[dict[str, Any]]:
    generations = [
        {
            "id": str(number),
            "traceId": "t",
            "type": "GENERATION",
            "startTime": f"2026-01-01T00:00:0{number}Z",
            "input": json.dumps({"messages": call[:-1], "tools": [TOOL]}),
            "output": json.dumps({"choices": [{"message": call[-1]}]}),
            **changed,
        }
        for number, call in enumerate(CALLS)
    ]
    return [{"id": "s", "traceId": "t", "type": "SPAN", "input": "1 + 1?", "output": "2."}, *generations]


def atif() -> dict[str, Any]:
    called = {"tool_call_id": "c1", "function_name": "add", "arguments": {"a": 1}}
    steps: list[dict[str, Any]] = [
        {"source": "system", "message": "Be brief."},
        {"source": "user", "message": "1 + 1?"},
        {
            "source": "agent",
            "message": "",
            "tool_calls": [called],
            "observation": {"results": [{"source_call_id": "c1", "content": "2"}]},
        },
        {"source": "agent", "message": [{"type": "text", "text": "2."}]},
    ]
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    agent = {"name": "a", "version": "1", "tool_definitions": [TOOL]}
    return {"schema_version": "ATIF-v1.8", "agent": agent, "steps": numbered}


KINDS: dict[str, Callable[[], str]] = {
    "ATIF": lambda: json.dumps(atif(), indent=1),
    "conventions, SDK": lambda: lines_of_sdk(recorded(of_conventions)),
    "conventions, OTLP": lambda: otlp(recorded(of_conventions)),
    "OpenInference, SDK": lambda: lines_of_sdk(recorded(of_openinference)),
    "OpenInference, OTLP": lambda: otlp(recorded(of_openinference)),
    "numbers": lambda: otlp(recorded(of_numbers)),
    "Phoenix": phoenix,
    "Langfuse": lambda: "\n".join(json.dumps(one) for one in langfuse()),
    "Langfuse, a list": lambda: json.dumps(langfuse()),
    "Langfuse, a page": lambda: json.dumps({"data": langfuse(), "meta": {}}),
    "Langfuse, a trace": lambda: json.dumps({"id": "t", "observations": langfuse()}),
    "Langfuse, by OTLP": lambda: otlp(
        recorded(
            lambda call: {
                "langfuse.observation.type": "generation",
                "langfuse.observation.input": json.dumps({"messages": call[:-1], "tools": [TOOL]}),
                "langfuse.observation.output": json.dumps(call[-1]),
            }
        )
    ),
}


def run(folder: Path, *arguments: str) -> Any:
    return CliRunner(env={"COLUMNS": "400"}).invoke(app, ["import", *arguments, "--to", str(folder / "chats.jsonl")])


def imported(folder: Path, text: str, name: str = "traces.jsonl") -> list[Any]:
    (folder / name).write_text(text)
    done = run(folder, str(folder / name))
    assert done.exit_code == 0, done.output
    return [json.loads(line) for line in (folder / "chats.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_holds_the_same_conversation(kind: str, tmp_path: Path) -> None:
    assert imported(tmp_path, KINDS[kind]()) == [{"messages": WHOLE, "tools": [TOOL]}]


def test_events_of_older_conventions(tmp_path: Path) -> None:
    spans = recorded(lambda call: {"gen_ai.operation.name": "chat"}, as_events)
    assert imported(tmp_path, otlp(spans)) == [{"messages": WHOLE}]


def test_two_instruments_of_one_call_count_once_and_another_trace_by_itself(tmp_path: Path) -> None:
    text = "\n".join(json.dumps(one) for one in (*langfuse(), *langfuse(), *langfuse(traceId="u")))
    assert len(imported(tmp_path, text)) == 2


def test_a_branch_is_a_conversation_of_its_own(tmp_path: Path) -> None:
    other = langfuse()[1] | {"id": "9", "output": "No.", "startTime": "2026-01-01T00:00:09Z"}
    found = imported(tmp_path, "\n".join(json.dumps(one) for one in (*langfuse(), other)))
    assert [one["messages"][-1]["content"] for one in found] == ["2.", "No."]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("1795000000000000000", "1795000000123456789"),  # of which floats have fewer digits, or the same
        ("1795000000123456700", "1795000000123456789"),
        ("2026-01-01T00:00:00Z", "2026-01-01T00:00:00.5Z"),
        ("2026-01-01T00:00:00.5+02:00", "2025-12-31T23:00:00+00:00"),
        ("2026-01-01T00:00:00", "2026-01-01T00:00:01Z"),
        ("at noon", "2026-01-01T00:00:01Z"),
        (None, "1"),
        ("9" * 5000, "1"),
        (1.795e18, 1.796e18),
        (float("nan"), 1),
    ],
)
def test_conversations_are_in_the_order_of_their_moments_however_these_are_written(
    first: Any, second: Any, tmp_path: Path
) -> None:
    def at(moment: Any, answer: str) -> dict[str, Any]:
        return langfuse()[1] | {"id": answer, "output": answer, "startTime": moment}

    found = imported(tmp_path, json.dumps([at(second, "second"), at(first, "first")]))
    assert [one["messages"][-1]["content"] for one in found] == ["first", "second"]


def test_a_call_that_another_continues_is_no_conversation_where_the_clock_stepped_back(tmp_path: Path) -> None:
    turned = langfuse()
    turned[1]["startTime"], turned[2]["startTime"] = turned[2]["startTime"], turned[1]["startTime"]
    assert imported(tmp_path, json.dumps(turned)) == [{"messages": WHOLE, "tools": [TOOL]}]


def test_copied_answers_are_context_and_subagents_are_imported(tmp_path: Path) -> None:
    trajectory = atif()
    trajectory["steps"][2]["is_copied_context"] = True
    [main, below] = imported(tmp_path, json.dumps({**trajectory, "subagent_trajectories": [atif()]}), "t.json")
    assert main["messages"][2]["weight"] == 0
    assert below["messages"] == WHOLE


def test_roles_of_other_libraries_halves_of_characters_and_tools_that_are_names(tmp_path: Path) -> None:
    said = {"messages": [{"role": "human", "content": "Hi \ud800"}], "tools": ["add"]}
    one = {"traceId": "t", "type": "GENERATION", "input": said, "output": {"role": "ai", "content": "Hello."}}
    messages = [{"role": "user", "content": "Hi ?"}, {"role": "assistant", "content": "Hello."}]
    assert imported(tmp_path, json.dumps(one)) == [{"messages": messages}]


def test_a_folder_and_several_files(tmp_path: Path) -> None:
    (tmp_path / "traces" / "below").mkdir(parents=True)
    (tmp_path / "traces" / "below" / "trajectory.json").write_text(json.dumps(atif()))
    (tmp_path / "traces" / "notes.txt").write_text("not read")
    (tmp_path / "one.json").write_text(json.dumps(langfuse()))
    done = run(tmp_path, str(tmp_path / "traces"), str(tmp_path / "one.json"), "--json")
    assert json.loads(done.output) == {
        "to": str(tmp_path / "chats.jsonl"),
        "conversations": 2,
        "left_out": 0,
        "calls_without_text": 0,
        "other_records": 1,
        "below_min_score": 0,
        "scores_left_out": 0,
    }


BROKEN = {"gen_ai.input.messages": '[{"role": "user", "parts": ["word"]}]'}
REFUSED: dict[str, tuple[str, str]] = {
    "no JSON": ("{", "is no JSON"),
    "a broken line": (json.dumps(atif()) + '\n{"a": ', "line 2 is no JSON"),
    "another kind": ('{"messages": [], "x": 1}', "an object with messages, x is none of: ATIF"),
    "a number": (json.dumps(atif()) + "\n7", "line 2: 7 is no object"),
    "half a trajectory": ('{"schema_version": "ATIF-v1.8", "agent": {}}', "not what ATIF writes: KeyError: 'steps'"),
    "a part that is a word": (
        json.dumps({"spanId": "1", "traceId": "2", "attributes": {"gen_ai.operation.name": "chat", **BROKEN}}),
        "not what a span of OTLP writes: AttributeError",
    ),
    "spans without text": (
        otlp(recorded(lambda call: {"gen_ai.operation.name": "chat"})),
        "2 model calls without text, 1 other",
    ),
    "no model call": (json.dumps(langfuse()[:1]), "spans of tools, agents or chains"),
    "a page without the fields": (json.dumps([{**one, "output": None} for one in langfuse()]), "fields=core,basic,io"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_imported_is_named_and_nothing_is_written(what: str, tmp_path: Path) -> None:
    text, words = REFUSED[what]
    (tmp_path / "traces.jsonl").write_text(text)
    done = run(tmp_path, str(tmp_path / "traces.jsonl"))
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert not (tmp_path / "chats.jsonl").exists()


def test_every_kind_is_tried_above() -> None:
    known = {reader.name for reader in TRACE_READERS}
    used: set[str] = set()
    for make in KINDS.values():
        text = make()
        values = [json.loads(text)] if not text.count("\n{") else [json.loads(line) for line in text.splitlines()]
        for value in values:
            one = value[0] if isinstance(value, list) else value
            used.add(next(reader.name for reader in TRACE_READERS if reader.knows(one)))
    assert known - used == {"a span of OTLP", "a score of Langfuse"}  # test_import_scores.py has that
