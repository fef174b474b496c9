"""`agl import` of files that somebody else wrote: sizes, nesting, odd files, and traces of very many calls."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from agentlightning.adapter.imports import Imported, add_value
from agentlightning.adapter.numbered import numbered_messages
from agentlightning.cli.commands.train import ImportOptions
from agentlightning.cli.import_traces import import_traces
from agentlightning.errors import ConfigError

CALL = {"traceId": "t", "id": "a", "type": "GENERATION", "input": "hi", "output": "ho", "startTime": 1}


def imported(tmp_path: Path, *texts: str, **options: Any) -> list[dict[str, Any]]:
    for number, text in enumerate(texts):
        (tmp_path / f"{number}.json").write_text(text)
    to = tmp_path / "to.jsonl"
    import_traces(ImportOptions(sources=[tmp_path], to=to, **options))
    return [json.loads(line) for line in to.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["pipe", "a terabyte"])
def test_a_file_that_is_none_is_named(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "odd.json"
    if kind == "pipe":
        os.mkfifo(file)
    else:
        with file.open("wb") as opened:
            opened.truncate(2**40)
    with pytest.raises(ConfigError, match=r"odd\.json cannot be read"):
        imported(tmp_path, json.dumps(CALL))


@pytest.mark.parametrize("digits", [400, 4_000, 6_000])
def test_numbers_of_many_digits_are_none(digits: int, tmp_path: Path) -> None:
    score = '{"name": "x", "dataType": "NUMERIC", "value": %s}' % ("9" * digits)
    call = json.dumps({**CALL, "startTime": "MOMENT", "scores": ["SCORE"]})
    text = call.replace('"MOMENT"', "9" * digits).replace('"SCORE"', score)
    (line,) = imported(tmp_path, text)
    assert "scores" not in line


def calls_of_one_trace(number: int) -> Imported:
    found = Imported()
    for n in range(number):
        add_value({**CALL, "id": str(n), "output": str(n), "parentObservationId": "top"}, found)
    add_value({"name": "s", "dataType": "NUMERIC", "value": 1, "traceId": "t", "observationId": "top"}, found)
    return found


def test_time_grows_with_the_calls_of_a_trace_and_not_with_their_square() -> None:
    taken: list[float] = []
    for number in (1_000, 4_000):
        found = calls_of_one_trace(number)
        began = time.process_time()
        examples = found.examples()
        assert (len(examples), examples[0]["scores"], found.unmatched_scores()) == (number, {"s": 1}, 0)
        taken.append(time.process_time() - began)
    assert taken[1] < max(8 * taken[0], 1.0)  # four times as many took sixteen times as long


def test_things_above_one_another_are_followed_a_thousand_times() -> None:
    found = Imported()
    for n in range(20_000):
        add_value({**CALL, "id": f"s{n}", "type": "SPAN", "parentObservationId": f"s{n + 1}"}, found)
    add_value({**CALL, "parentObservationId": "s0"}, found)
    for n in range(200):
        score = {"name": f"n{n}", "dataType": "NUMERIC", "value": 1, "traceId": "t", "observationId": "s500"}
        add_value(score, found)
    began = time.process_time()
    assert len(found.examples()[0]["scores"]) == 200
    assert time.process_time() - began < 5


def test_numbered_attributes_are_read_once() -> None:
    attributes = {f"gen_ai.prompt.{n}.{key}": "x" for n in range(20_000) for key in ("role", "content")}
    began = time.process_time()
    assert len(numbered_messages(attributes, "gen_ai.prompt")) == 20_000
    assert time.process_time() - began < 5
    assert not numbered_messages({"gen_ai.prompt.1.role": "user"}, "gen_ai.prompt")
