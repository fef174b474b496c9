"""`agl import`: scores of traces stay with the conversations, and choose among them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentlightning.adapter.imports import Imported, add_value
from agentlightning.algorithm.sampling.examples import messages_of
from agentlightning.errors import ConfigError
from agentlightning.finetuning.lines import Lines
from agentlightning.types.finding import counted
from tests.cli.test_import import WHOLE, imported, langfuse, of_conventions, otlp, recorded, run

Scores = list[dict[str, Any]]


def score(name: str, value: Any, kind: str = "NUMERIC", **more: Any) -> dict[str, Any]:
    return {"id": f"{name}-{value}", "name": name, "value": value, "dataType": kind, "traceId": "t", **more}


def branched() -> Scores:
    """A conversation of two calls, and another end of it; their agent's span is above them."""
    calls = [{**one, **({"parentObservationId": "s"} if one["id"] != "s" else {})} for one in langfuse()]
    return [*calls, {**calls[1], "id": "9", "output": "No.", "startTime": "2026-01-01T00:00:09Z"}]


def found(*values: Any) -> list[tuple[str, Any, Any]]:
    """The end of each conversation, its scores, and what was said of them."""
    into = Imported()
    for value in values:
        add_value(value, into)
    return [(one["messages"][-1]["content"], one.get("scores"), one.get("score_comments")) for one in into.examples()]


def test_scores_of_a_trace_are_those_of_its_conversations() -> None:
    trace = {"id": "t", "observations": branched(), "scores": [score("good", 0.5, comment="So so.")]}
    assert found(trace) == [("2.", {"good": 0.5}, {"good": "So so."}), ("No.", {"good": 0.5}, {"good": "So so."})]
    assert found(*branched(), {"data": [score("good", 0.5), score("good", 1, traceId="u")]}) == [
        ("2.", {"good": 0.5}, None),
        ("No.", {"good": 0.5}, None),
    ]
    assert found(*langfuse()) == [("2.", None, None)]


@pytest.mark.parametrize(
    ("observation", "ends"),
    [("0", ["2."]), ("1", ["2."]), ("9", ["No."]), ("s", ["2.", "No."]), ("judge", ["No."]), ("unknown", [])],
)
def test_a_score_is_of_the_conversations_with_what_it_names(observation: str, ends: list[str]) -> None:
    """A call, what is above some, or what looks at one."""
    judge = {"id": "judge", "traceId": "t", "type": "EVALUATOR", "parentObservationId": "9"}
    scored = found(*branched(), judge, score("good", 1, observationId=observation))
    assert [end for end, scores, _ in scored if scores] == ends


def test_subjects_of_the_newest_api() -> None:
    def of(**subject: str) -> dict[str, Any]:
        return {"id": "1", "name": "x", "value": 1.0, "dataType": "NUMERIC", "subject": subject}

    ends = {
        "a trace": (of(kind="trace", id="t"), ["2.", "No."]),
        "another trace": (of(kind="trace", id="u"), []),
        "an observation": (of(kind="observation", id="9", traceId="t"), ["No."]),
        "a session": (of(kind="session", id="t"), []),
        "an experiment": (of(kind="experiment", id="t"), []),
    }
    for kind, (given, expected) in ends.items():
        scored = found(*branched(), {"data": [given], "meta": {}})
        assert [end for end, scores, _ in scored if scores] == expected, kind
    assert not found({"id": "t", "observations": langfuse(), "scores": [of(kind="session", id="t")]})[0][1]


def test_two_records_of_one_call_are_one_with_the_scores_of_both() -> None:
    again = [{**one, "id": f"again-{one['id']}"} for one in langfuse()]
    scored = found(*langfuse(), *again, score("a", 1, observationId="1"), score("b", 2, observationId="again-1"))
    assert scored == [("2.", {"a": 1, "b": 2}, None)]


VALUES: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "the lowest of several": ([score("x", 0.5, comment="low"), score("x", 0.9, comment="high")], {"x": 0.5}),
    "the lowest, which comes later": ([score("x", 0.9, comment="high"), score("x", 0.5, comment="low")], {"x": 0.5}),
    "true": ([score("x", 1, "BOOLEAN", stringValue="True")], {"x": 1}),
    "false as a text": ([score("x", None, "BOOLEAN", stringValue="False")], {"x": 0}),
    "a category": ([score("x", 2, "CATEGORICAL", stringValue="partly")], {"x": "partly"}),
    "the last category": ([score("x", None, "CATEGORICAL", stringValue=one) for one in ("no", "yes")], {"x": "yes"}),
    "a text": ([score("x", "well said", "TEXT")], {"x": "well said"}),
    "a correction": ([score("x", "4.", "CORRECTION")], None),
    "no number": ([score("x", float("nan")), score("y", None)], None),
    "true, of the newest API": ([score("x", True, "BOOLEAN")], {"x": 1}),
    "a category of the newest API": ([score("x", "partly", "CATEGORICAL")], {"x": "partly"}),
    "of a session": ([score("x", 1, traceId=None, sessionId="s")], None),
}


@pytest.mark.parametrize("kind", VALUES)
def test_values_of_each_type(kind: str) -> None:
    scores, expected = VALUES[kind]
    ((_, values, comments),) = found(*langfuse(), *scores)
    assert values == expected
    if kind.startswith("the lowest"):
        assert comments == {"x": "low"}


def test_scores_by_name_of_an_export() -> None:
    assert found({"id": "t", "observations": langfuse(), "scores": {"x": [0.5, 0.25], "y": "yes"}}) == [
        ("2.", {"x": 0.25, "y": "yes"}, None)
    ]
    observations = langfuse()
    observations[1]["scores"] = [{"name": "x", "value": 1}]
    assert found(observations) == [("2.", {"x": 1}, None)]


def test_evaluations_of_opentelemetry_are_scores() -> None:
    request = json.loads(otlp(recorded(of_conventions)))
    spans = [span for r in request["resourceSpans"] for scope in r["scopeSpans"] for span in scope["spans"]]

    def evaluation(name: str, **given: Any) -> dict[str, Any]:
        values = {f"gen_ai.evaluation.{key.replace('_', '.')}": value for key, value in given.items()}
        return {"name": "gen_ai.evaluation.result", "attributes": {"gen_ai.evaluation.name": name, **values}}

    call = next(one for one in spans if any(a["key"] == "gen_ai.output.messages" for a in one["attributes"]))
    call["events"] = [evaluation("right", score_value=0.75, explanation="Nearly.")]
    judge = {"traceId": call["traceId"], "spanId": "00ff", "parentSpanId": call["spanId"], "attributes": []}
    judge["events"] = [evaluation("tone", score_label="kind"), evaluation("empty"), {"name": "other"}]
    request["resourceSpans"][0]["scopeSpans"][0]["spans"].append(judge)
    assert found(request) == [("2.", {"right": 0.75, "tone": "kind"}, {"right": "Nearly."})]


def traces() -> str:
    """Three conversations, two of which are scored."""
    known = [langfuse(traceId=trace)[1] | {"output": f"of {trace}"} for trace in ("a", "b", "c")]
    scores = [score("right", 0.9, traceId="a"), score("right", 0.2, traceId="b"), score("right", 1, traceId="gone")]
    return json.dumps([*known, *scores, score("tone", None, "CATEGORICAL", stringValue="kind", traceId="a")])


def test_conversations_are_chosen_by_their_scores(tmp_path: Path) -> None:
    everything = imported(tmp_path, traces())
    assert [one.get("scores") for one in everything] == [{"right": 0.9, "tone": "kind"}, {"right": 0.2}, None]
    for text, expected in {"right=0.5": ["of a"], "right=0.2": ["of a", "of b"], "right=-1": ["of a", "of b"]}.items():
        (tmp_path / "chats.jsonl").unlink()
        done = run(tmp_path, str(tmp_path / "traces.jsonl"), "--min-score", text)
        assert done.exit_code == 0, done.output
        lines = [json.loads(line) for line in (tmp_path / "chats.jsonl").read_text().splitlines()]
        assert [one["messages"][-1]["content"] for one in lines] == expected
        assert "Scores of conversations: right (2), tone (1)." in done.output
        left = counted(3 - len(expected), "conversation is", "conversations are")
        assert f"{left} left out by --min-score." in done.output
        assert "1 score is of no model call" in done.output
    (tmp_path / "chats.jsonl").unlink()
    counts = json.loads(run(tmp_path, str(tmp_path / "traces.jsonl"), "--min-score", "right=0.5", "--json").output)
    assert (counts["conversations"], counts["below_min_score"], counts["scores_left_out"]) == (1, 2, 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("wright=1", "no conversation has a score 'wright'. There is right, tone."),
        ("tone=1", "the scores 'tone' are texts, such as 'kind'"),
        ("right", "give NAME=VALUE"),
        ("right=high", "give NAME=VALUE"),
        ("right=nan", "give NAME=VALUE"),
        ("=1", "give NAME=VALUE"),
        ("right=1", "None of 3 conversations has these scores: right=1"),
    ],
)
def test_a_choice_that_chooses_nothing_is_refused(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text(traces())
    done = run(tmp_path, str(tmp_path / "traces.jsonl"), "--min-score", text)
    assert isinstance(done.exception, ConfigError)
    assert words in str(done.exception)
    assert not (tmp_path / "chats.jsonl").exists()


def test_a_conversation_with_scores_is_a_chat_to_learn(tmp_path: Path) -> None:
    text = json.dumps({"id": "t", "observations": langfuse(), "scores": [score("right", 1, comment="Yes.")]})
    (chat,) = imported(tmp_path, text)
    assert set(chat) == {"messages", "tools", "scores", "score_comments"}
    assert messages_of(chat)[0] == WHOLE
    Lines(tmp_path / "chats.jsonl", "supervised").check()  # the fine-tuning API takes it, too
