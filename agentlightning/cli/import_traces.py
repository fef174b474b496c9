"""`agl import`: traces of other tools as conversations to fine-tune on."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from rich.text import Text

from agentlightning.adapter.finetuning import fine_tuning_lines, to_jsonl
from agentlightning.adapter.imports import Imported, add_value
from agentlightning.adapter.scores import COMMENTS, SCORES
from agentlightning.cli.commands.train import ImportOptions
from agentlightning.console import terminal
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write, meant_by, reason_of_file
from agentlightning.metrics.sink import RUN_FILE
from agentlightning.reading import parsed_json, read_text
from agentlightning.types.finding import counted

_BYTES = 2**32
"""Of a file of traces."""
_NO_TEXT = (
    "Their text was not recorded. With OpenTelemetry it is if "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY is set while the agent runs; from Langfuse's API ask "
    "for fields=core,basic,io,model,usage."
)


_OF_CHATS = frozenset(("messages", "conversations", "conversation", "mapping", "prompt", "input"))
"""Fields of conversations that no program traced."""
_CHATS = (
    " Conversations need no import: agl train --data FILE takes them, a line of JSON for each, "
    '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
)


def import_traces(options: ImportOptions) -> None:
    """Write the conversations of the files to a new one, and say what was left out. Raises ConfigError where a file
    cannot be read, with its line, or where there is no conversation in them."""
    if options.to.exists():
        raise ConfigError(f"'{options.to}' is there already; import to a new file.")
    found = Imported()
    for place, value in _values(options.sources):
        try:
            add_value(value, found)
        except ValueError as error:
            chats = _CHATS if _OF_CHATS.intersection(_first(value)) else ""
            raise ConfigError(f"{place}: {error}.{chats}") from None
    examples = found.examples()
    good = _good(examples, options.min_score)
    lines = [{**line, **_scores_of(example)} for example in good for line in fine_tuning_lines([example])]
    counts = {"to": str(options.to), "conversations": len(lines), "left_out": len(good) - len(lines)}
    counts |= {"calls_without_text": found.silent, "other_records": found.others}
    counts |= {"below_min_score": len(examples) - len(good), "scores_left_out": found.unmatched_scores()}
    if not lines:
        raise ConfigError(_nothing(counts, options.min_score))
    atomic_write(options.to, to_jsonl(lines).encode("utf-8", "replace").decode())  # half a character is none
    if options.as_json:
        terminal().print_json(json.dumps(counts))
        return
    _print(options.to, counts, examples)


def _first(value: Any) -> Mapping[str, Any]:
    """The object that a value of JSON is, or the first of its list; an empty one for anything else."""
    first = value[0] if isinstance(value, list) and value else value
    return first if isinstance(first, Mapping) else {}


def _nothing(counts: Mapping[str, Any], wanted: Sequence[str]) -> str:
    """Why there is no conversation."""
    if counts["below_min_score"]:
        return f"None of {counted(counts['below_min_score'], 'conversation')} has these scores: {', '.join(wanted)}."
    seen = {
        "model calls without text": counts["calls_without_text"],
        "other records": counts["other_records"],
        "conversations without an answer": counts["left_out"],
    }
    if not any(seen.values()):
        return "There is no conversation in these files: no call of a model is recorded in them, or none has an answer."
    why = "They are spans of tools, agents or chains." if counts["other_records"] else ""
    why = _NO_TEXT if counts["calls_without_text"] else why
    held = ", ".join(f"{count} {what}" for what, count in seen.items())
    return f"There is no conversation in these files: {held}. {why}".rstrip()


def _print(to: Path, counts: Mapping[str, Any], examples: Sequence[Any]) -> None:
    """Say what was written, what was left out, and which scores there are."""
    terminal().print(f"{to}: {counted(counts['conversations'], 'conversation')}.")
    if counts["calls_without_text"]:
        terminal().print(
            f"{counted(counts['calls_without_text'], 'model call is', 'model calls are')} left out. {_NO_TEXT}"
        )
    if counts["left_out"]:
        terminal().print(
            f"{counted(counts['left_out'], 'conversation is', 'conversations are')} left out: no answer, or a "
            "tool's result without its "
            "call."
        )
    if names := Counter(name for example in examples for name in example.get(SCORES, {})):
        shown = ", ".join(f"{name} ({count})" for name, count in sorted(names.items()))
        terminal().print(Text(f"Scores of conversations: {shown}."))
    if counts["below_min_score"]:
        terminal().print(
            f"{counted(counts['below_min_score'], 'conversation is', 'conversations are')} left out by --min-score."
        )
    if counts["scores_left_out"]:
        terminal().print(
            f"{counted(counts['scores_left_out'], 'score is', 'scores are')} of no model call in these files, or "
            "corrections. Langfuse's API says what a score is of with fields=details,subject."
        )
    terminal().print(f"Next: agl train --data {quote(str(to))} --model MODEL")


def _good(examples: Sequence[Any], wanted: Sequence[str]) -> list[Any]:
    """The conversations whose scores are at least so high. Raises ConfigError for a name that no score has, and for one
    whose scores are texts."""
    scores = [pair for example in examples for pair in example.get(SCORES, {}).items()]
    known = dict(sorted(scores, key=lambda pair: isinstance(pair[1], int | float)))
    least: dict[str, float] = {}
    for text in wanted:
        name, equals, value = text.rpartition("=")
        try:
            least[name] = float(value)
        except ValueError:
            equals = ""
        if not name or not equals or not math.isfinite(least[name]):
            raise ConfigError(f"--min-score {text}: give NAME=VALUE, for example correctness=0.8.")
        if name not in known:
            there = f"There is {', '.join(sorted(known))}." if known else "No conversation has a score."
            raise ConfigError(f"--min-score {text}: no conversation has a score {name!r}. {there}")
        if isinstance(known[name], str):
            raise ConfigError(f"--min-score {text}: the scores {name!r} are texts, such as {known[name]!r}.")
    return [one for one in examples if all(_reaches(one, name, value) for name, value in least.items())]


def _reaches(example: Any, name: str, least: float) -> bool:
    value = example.get(SCORES, {}).get(name)
    return isinstance(value, int | float) and value >= least


def _scores_of(example: Any) -> dict[str, Any]:
    return {name: example[name] for name in (SCORES, COMMENTS) if name in example}


def _values(sources: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Each value of JSON, with the file and line that it begins in."""
    for source in sources:
        if not source.exists():
            raise ConfigError(f"There is no file {source}.{meant_by(source)}")
        if (source / RUN_FILE).is_file():
            raise ConfigError(
                f"'{source}' is a run of this program, whose conversations are written by  agl export "
                f"{quote(str(source))} --jsonl FILE"
            )
        files = (
            [source] if source.is_file() else sorted(p for p in source.rglob("*") if p.suffix in (".json", ".jsonl"))
        )
        if not files:
            raise ConfigError(f"In {source} is no file that ends in .json or .jsonl.")
        for file in files:
            yield from _read(file)


def _read(file: Path) -> Iterator[tuple[str, Any]]:
    """The values of a file that is one value of JSON, or one in each line."""
    try:
        text = read_text(file, _BYTES, encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of_file(error)}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        yield str(file), parsed_json(text)
        return
    except ValueError as error:
        if len(lines) < 2 or not _is_json(lines[0][1]):
            raise ConfigError(
                f"{file} is no JSON: {error}. It reads what tracers write: OpenTelemetry, Phoenix, Langfuse, ATIF."
            ) from None
    for number, line in lines:
        try:
            yield f"{file}, line {number}", parsed_json(line)
        except ValueError as error:
            raise ConfigError(f"{file}, line {number} is no JSON: {error}") from None


def _is_json(line: str) -> bool:
    try:
        parsed_json(line)
    except ValueError:
        return False
    return True
