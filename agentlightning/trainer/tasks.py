"""Tasks in a file: JSON lines, a JSON array, CSV with a header, or Parquet, told by the file's ending."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError, missing_extra


def load_tasks(path: str | Path) -> list[Any]:
    """The tasks in a file, in its order. Raises ConfigError that says what is wrong with it, and in which line."""
    if str(path).startswith(("http://", "https://")):
        raise ConfigError(
            f"Tasks are a list or a file, and '{path}' is an address. A server that hands tasks out, as in 0.1, is not "
            "kept: train here with fit(agent, tasks), and let runners elsewhere join by `agl runner --server URL`."
        )
    file = Path(path).expanduser()
    read = _READERS.get(file.suffix.lower())
    if not file.is_file():
        raise ConfigError(f"There is no file '{file}' with tasks. Give one that ends in {_ENDINGS}.")
    if read is None:
        raise ConfigError(f"'{file}' ends in none of {_ENDINGS}. Rename it, or give a list of tasks.")
    try:
        tasks = read(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text in UTF-8: {error}.") from error
    if not tasks:
        raise ConfigError(f"{file} holds no tasks.")
    return tasks


def _lines(file: Path) -> list[Any]:
    tasks: list[Any] = []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig").split("\n"), 1):
        if line.strip():
            tasks.append(_value(line, file, number))
    if len(tasks) == 1 and isinstance(tasks[0], list):
        raise ConfigError(
            f"{file} is one JSON array, and a .jsonl file has one task per line. Rename it to {file.stem}.json: its "
            f"{len(tasks[0])} entries are the tasks then."
        )
    return tasks


def _value(line: str, file: Path, number: int) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        hint = " It looks like a JSON array over many lines: let its name end in .json." if line.strip() in "[{" else ""
        raise ConfigError(f"{file}, line {number} is not JSON: {error}.{hint}") from error


def _array(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8-sig")
    try:
        found = json.loads(text)
    except ValueError as error:
        hint = " With one JSON value per line its name must end in .jsonl." if "Extra data" in str(error) else ""
        raise ConfigError(f"{file} is not JSON: {error}.{hint}") from error
    if isinstance(found, list):
        return found
    lists = [name for name, value in found.items() if isinstance(value, list)] if isinstance(found, dict) else []
    among = f" Its part {lists[0]!r} is one: write that into a file of its own." if lists else ""
    alone = (
        "" if lists else " If that is the only task, put it in brackets; with one task per line, let it end in .jsonl."
    )
    raise ConfigError(f"{file} holds a {type(found).__name__}, not an array of tasks.{among}{alone}")


def _table(file: Path) -> list[dict[str, Any]]:
    """Each row by its header. Everything in CSV is text: numbers stay text too."""
    with file.open(encoding="utf-8-sig", newline="") as opened:
        rows = list(csv.DictReader(opened))
    odd = next((number for number, row in enumerate(rows, 2) if None in row or None in row.values()), None)
    if odd is not None:
        raise ConfigError(f"{file}, row {odd} has not as many fields as the header. Quote fields that hold commas.")
    return rows


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise missing_extra("parquet", "pyarrow") from None
    return parquet.read_table(file).to_pylist()


_READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _array,
    ".csv": _table,
    ".parquet": _parquet,
}
_ENDINGS = ", ".join(_READERS)
