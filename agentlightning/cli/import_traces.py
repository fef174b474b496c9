"""`agl import`: traces of other tools as conversations to fine-tune on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from shlex import quote
from typing import Any

from agentlightning.adapter.finetuning import fine_tuning_lines, to_jsonl
from agentlightning.adapter.imports import Imported, add_value
from agentlightning.cli.commands.train import ImportOptions
from agentlightning.console import terminal
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write, meant_by

_NO_TEXT = (
    "Their text was not recorded. With OpenTelemetry it is if "
    "OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT=SPAN_ONLY is set while the agent runs; from Langfuse's API ask "
    "for fields=core,basic,io,model,usage."
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
            raise ConfigError(f"{place}: {error}.") from None
    examples = found.examples()
    lines = fine_tuning_lines(examples)
    left_out = len(examples) - len(lines)
    if not lines:
        why = _NO_TEXT if found.silent else "They are spans of tools, agents or chains." if found.others else ""
        raise ConfigError(
            f"There is no conversation in these files: {found.silent} model calls without text, {found.others} other "
            f"records, {left_out} conversations without an answer. {why}".rstrip()
        )
    atomic_write(options.to, to_jsonl(lines).encode("utf-8", "replace").decode())  # half a character is none
    counts = {"to": str(options.to), "conversations": len(lines), "left_out": left_out}
    counts |= {"calls_without_text": found.silent, "other_records": found.others}
    if options.as_json:
        terminal().print_json(json.dumps(counts))
        return
    terminal().print(f"{options.to}: {len(lines)} conversations.")
    if found.silent:
        terminal().print(f"{found.silent} model calls are left out. {_NO_TEXT}")
    if left_out:
        terminal().print(
            f"{left_out} conversations are left out: they have no answer, or a tool's result without its call."
        )
    terminal().print(f"Next: agl train --data {quote(str(options.to))} --model MODEL")


def _values(sources: Sequence[Path]) -> Iterator[tuple[str, Any]]:
    """Each value of JSON, with the file and line that it begins in."""
    for source in sources:
        if not source.exists():
            raise ConfigError(f"There is no file {source}.{meant_by(source)}")
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
        text = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    try:
        yield str(file), json.loads(text)
        return
    except (ValueError, RecursionError) as error:
        if len(lines) < 2 or not _is_json(lines[0][1]):
            raise ConfigError(f"{file} is no JSON: {error}") from None
    for number, line in lines:
        try:
            yield f"{file}, line {number}", json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{file}, line {number} is no JSON: {error}") from None


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True
