"""Tasks in a file (JSON lines, a JSON array, CSV with a header, or Parquet, told by its ending), or in a data set."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from glob import glob
from pathlib import Path
from typing import Any

from agentlightning.errors import ConfigError, missing_extra
from agentlightning.files import meant_by, no_path, reason_of_file
from agentlightning.reading import within_depth
from agentlightning.trainer import hub

_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")


def load_tasks(path: str | Path) -> list[Any]:
    """The tasks in a file, or in a data set such as `hf:openai/gsm8k:main@train`, in its order.

    Raises ConfigError that says what is wrong with it, and in which line.
    """
    if str(path).startswith(hub.PREFIX):
        return _checked(hub.load_rows(str(path)), str(path))
    if str(path).startswith(("http:/", "https:/")):  # a Path has one slash only
        address = re.sub("^(https?:)/+", r"\1//", str(path))
        raise ConfigError(
            f"Tasks are a list or a file, and '{address}' is an address: download the file first. A server of tasks, "
            "as in 0.1, is not kept: train here with fit(agent, tasks), and runners join by `agl runner --server URL`."
        )
    file = Path(path).expanduser()
    read = _READERS.get(file.suffix.lower())
    if not file.is_file():
        raise ConfigError(_no_file(file))
    if read is None:
        raise ConfigError(f"'{file}' ends in none of {_ENDINGS}. {_OTHERS.get(file.suffix.lower(), _RENAME)}")
    if (size := file.stat().st_size) > MOST_BYTES:
        raise ConfigError(f"{file} has {size:,} bytes, and of a file of tasks at most {MOST_BYTES:,} are read.")
    try:
        _refuse_another_kind(file)
        tasks = read(file)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not text in UTF-8: {error}. Save it as UTF-8.") from error
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {reason_of_file(error)}.") from error
    if not tasks:
        below = " It has a line with names, and no row below it." if read is _table and file.stat().st_size else ""
        raise ConfigError(f"{file} holds no tasks.{below}")
    return tasks if read is _lines else _checked(tasks, str(file))  # lines were checked one by one


def _refuse_another_kind(file: Path) -> None:
    """Raises ConfigError for a file that is empty, or of another kind than its name says."""
    with file.open("rb") as opened:
        first = opened.read(_LOOKED_AT).removeprefix(b"\xef\xbb\xbf").lstrip()
    if not first and file.stat().st_size < _LOOKED_AT:
        raise ConfigError(f"{file} holds no tasks.")
    kind = next((words for start, words in _BEGINNINGS.items() if first.lower().startswith(start)), None)
    if kind is not None and file.suffix.lower() != ".parquet":
        raise ConfigError(f"{file} is {kind}")


def _checked(tasks: list[Any], where: str) -> list[Any]:
    for number, task in enumerate(tasks, 1):
        check_texts(task, f"{where}, task {number}")
    return tasks


def _no_file(file: Path) -> str:
    """Why there are no tasks to be read at this place."""
    if file.is_dir():
        inside = sorted(f.name for f in file.iterdir() if f.suffix.lower() in _READERS)
        example = f", for example {file / inside[0]}" if inside else ""
        return f"'{file}' is a folder, and tasks are read from a file{example}."
    if file.exists():
        return f"'{file}' is a pipe, a socket or a device. Write the tasks into a file first."
    named = (
        f" A data set of the Hugging Face Hub is written so: {hub.PREFIX}{file}@train"
        if re.fullmatch(r"[\w-]+/[\w-]+", str(file))
        else ""
    )
    return f"There is no file '{file}' with tasks.{meant_by(file, _READERS)} {_instead(str(file))}{named}"


def _instead(given: str) -> str:
    """What to give in place of what is no file."""
    if re.search(r"[*?]", given) and (found := sorted(glob(given, recursive=True))):
        return (
            f"Tasks are read from one file, such as {found[0]}. To join them:  cat {given} > all{Path(found[0]).suffix}"
        )
    if given.startswith(("[", "{")) or (" " in given and Path(given).suffix.lower() not in _READERS):
        return "Tasks themselves are given in a list, fit(agent, ['…']), or in a file.jsonl with a JSON value per line."
    return no_path(given) or f"Give one that ends in {_ENDINGS}."


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
        with within_depth():
            found = json.loads(line, object_pairs_hook=each_once)
    except ValueError as error:
        what_is_wrong = f": {error}" if isinstance(error, _Twice) else f" is not JSON: {error}"
        raise ConfigError(f"{file}, line {number}{what_is_wrong}.{_hint(line.strip())}") from error
    check_texts(found, f"{file}, line {number}")
    return found


class _Twice(ValueError):
    """An object that has a key twice."""


def each_once(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, as `json.loads` makes it. Raises ValueError for a key that it has twice: one of the two would be
    lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = _twice(name for name, _ in pairs)
        raise _Twice(f"the key {json.dumps(twice)} stands in it twice, so one value would be lost: leave one out")
    return found


def _twice(names: Iterable[str]) -> str | None:
    """The first name that has stood before; None where each stands once."""
    seen = set[str]()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def check_texts(task: Any, where: str) -> None:
    """Raises ConfigError for a text that no store can hold: half a surrogate pair, or NUL."""
    rest = [task]
    while rest:
        value = rest.pop()
        if isinstance(value, dict):
            rest += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            rest += value
        elif isinstance(value, str) and _UNSTORABLE.search(value):
            raise ConfigError(f"{where} has a text with NUL or half a surrogate pair: {value[:50]!r}. Take it out.")


def _hint(line: str) -> str:
    if _parses(line.rstrip(",")) and line.endswith(","):
        return " There is a comma at the end of the line: lines of a .jsonl file stand alone, without commas."
    if line.startswith("version https://git-lfs"):
        return " It is a pointer of git-lfs, not the data: fetch it with  git lfs pull"
    if line.startswith(("#", "//")):
        return " JSON has no comments: take the line out."
    if line in "[{" or (line.startswith("[") and _parses(line.rstrip(",") + "]")):
        return " It looks like a JSON array over many lines: let its name end in .json."
    if _parses(re.sub(r",(\s*[\]}])", r"\1", line)):
        return " JSON has no comma before a closing bracket: take it out."
    if _two_values(line):
        return " More than one value stands on it: write each on a line of its own."
    if re.match(r"[\[{]+'", line):
        return " It looks like Python, and JSON has double quotes: write each task with json.dumps(task)."
    return ""


def _two_values(line: str) -> bool:
    """Whether a second value begins behind the first."""
    try:
        with within_depth():
            rest = line[json.JSONDecoder().raw_decode(line)[1] :].lstrip()
            json.JSONDecoder().raw_decode(rest)
    except ValueError:
        return False
    return True


def _parses(text: str) -> bool:
    try:
        with within_depth():
            json.loads(text)
    except ValueError:
        return False
    return True


def _hint_of_array(text: str, error: ValueError) -> str:
    if "Extra data" in str(error):
        return " With one JSON value per line its name must end in .jsonl."
    if not isinstance(error, json.JSONDecodeError):
        return ""
    before, behind = text[: error.pos + 1].rstrip(), text[error.pos :].lstrip(", \t\r\n")
    if behind[:1] in tuple("]}") and before.rstrip("]} \t\r\n").endswith(","):
        return " JSON has no comma before a closing bracket: take it out."
    if re.match(r"\s*[\[{](\s*[\[{])?\s*'", text):
        return " It looks like Python, and JSON has double quotes: write the file with json.dump(tasks, file)."
    return ""


def _array(file: Path) -> list[Any]:
    text = file.read_text(encoding="utf-8-sig")
    try:
        with within_depth():
            found = json.loads(text, object_pairs_hook=each_once)
    except ValueError as error:
        hint = _hint_of_array(text, error)
        what_is_wrong = "" if isinstance(error, _Twice) else " is not JSON"
        raise ConfigError(f"{file}{what_is_wrong}: {error}.{hint}") from error
    if isinstance(found, list):
        return found
    lists = [name for name, value in found.items() if isinstance(value, list)] if isinstance(found, dict) else []
    if len(lists) > 1 and not any(isinstance(one, dict | list) for name in lists for one in found[name]):
        raise ConfigError(
            f"{file} holds a dict of lists, not an array of tasks. If those are columns, let its rows be the tasks: "
            "[dict(zip(columns, row)) for row in zip(*columns.values())]."
        )
    among = f" Its part {lists[0]!r} is one: write that into a file of its own." if lists else ""
    alone = (
        "" if lists else " If that is the only task, put it in brackets; with one task per line, let it end in .jsonl."
    )
    raise ConfigError(f"{file} holds a {type(found).__name__}, not an array of tasks.{among}{alone}")


def _table(file: Path) -> list[dict[str, Any]]:
    """Each row by its header. Everything in CSV is text: numbers stay text too."""
    with file.open(encoding="utf-8-sig", newline="") as opened:
        before = csv.field_size_limit(_FIELD)  # of the whole process
        reader = csv.DictReader(opened)
        try:
            if reader.fieldnames is None:
                return []
            rows = list(reader)
        except csv.Error as error:
            words = f"{file} cannot be read as CSV: {error}, at line {reader.line_num}."
            raise ConfigError(f"{words} A quote before it may not be closed. Mend it, or give JSON lines.") from error
        finally:
            csv.field_size_limit(before)
    header = (reader.fieldnames or [""])[0]
    if len(reader.fieldnames or ()) == 1 and (other := next((c for c in ";\t|" if c in header), None)):
        raise ConfigError(
            f"{file} has one column, {header!r}: its fields stand between {other!r}. Save it with commas, or let its "
            "rows be the tasks: list(csv.DictReader(open(…), delimiter=…))."
        )
    names = [name for name in reader.fieldnames or () if name]
    twice = _twice(names)
    if reader.fieldnames and _is_data(reader.fieldnames, rows):
        raise ConfigError(
            f"The first line of {file} looks like a task, not like names: {', '.join(reader.fieldnames)[:200]}. "
            "Put a line with the names in front, such as  question,answer"
        )
    if twice is not None:
        raise ConfigError(f"{file} has more than one column {twice!r}. Give each a name of its own.")
    odd = next((number for number, row in enumerate(rows, 2) if None in row or None in row.values()), None)
    if odd is not None:
        quote = any("\n" in str(value) for value in rows[odd - 2].values())
        why = " A quote that opens in it may not be closed." if quote else ""
        raise ConfigError(
            f"{file}, row {odd} has not as many fields as the header, which has {len(names)}.{why} Quote fields that "
            "hold commas, and leave no field out: nothing between two commas is an empty one."
        )
    return rows


def _is_data(heading: Sequence[str], rows: list[dict[str, Any]]) -> bool:
    """Whether a heading is a row like the others: it has numbers, or what is in a row."""
    numbers = any(re.fullmatch(r"[-+]?[0-9]+([.,][0-9]+)?", field.strip()) for field in heading)
    return numbers or any(row.get(field) == field for row in rows for field in heading)


def _parquet(file: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise missing_extra("parquet", "pyarrow") from None
    try:
        with parquet.ParquetFile(file) as opened:
            return list(_rows(opened, max(_EXPANDED, _RATIO * file.stat().st_size)))
    except (OSError, ValueError, OverflowError, ArrowException) as error:  # the third for dates that Python has not
        raise ConfigError(f"{file} cannot be read as Parquet: {error}. Write it again, or give JSON lines.") from error


def _rows(opened: Any, most: int) -> Iterator[dict[str, Any]]:
    """The rows of Parquet. Raises ValueError where they take more memory than `most` bytes: values that are all the
    same take next to nothing in a file."""
    about = opened.metadata
    if about.num_rows > MOST_TASKS:
        raise ValueError(f"it has {about.num_rows:,} rows, and more than {MOST_TASKS:,} are not read")
    groups = map(about.row_group, range(about.num_row_groups))
    if (values := sum(g.column(n).num_values for g in groups for n in range(g.num_columns))) > MOST_VALUES:
        raise ValueError(f"it has {values:,} values, and more than {MOST_VALUES:,} are not read")
    held = 0
    for batch in opened.iter_batches(_BATCH):
        held += batch.nbytes
        if held > most:
            raise ValueError(f"its values take more than {most:,} bytes in memory")
        yield from batch.to_pylist()


MOST_BYTES = 2**34
"""Of a file of tasks, which is read into memory: one of a terabyte is mostly a hole."""
MOST_TASKS = 10_000_000
"""Rows of Parquet, which take next to nothing in a file if they are all the same."""
MOST_VALUES = 100_000_000
"""In all its columns and lists."""
_EXPANDED, _RATIO = 2**30, 100
"""Values of Parquet take at most so many bytes, or so many times as many as the file."""
_BATCH = 256
"""Rows of Parquet that are read at once."""
_FIELD = 2**30
"""Characters of a field of CSV."""
_READERS: dict[str, Callable[[Path], list[Any]]] = {
    ".jsonl": _lines,
    ".ndjson": _lines,
    ".json": _array,
    ".csv": _table,
    ".parquet": _parquet,
}
_ENDINGS = ", ".join(_READERS)
_RENAME = "Rename it, or give a list of tasks."
_OTHERS = {
    **dict.fromkeys((".xlsx", ".xls", ".ods"), "Save the sheet as CSV."),
    **dict.fromkeys((".gz", ".zip", ".bz2", ".xz", ".zst"), "Unpack it first."),
    ".tsv": "Save it with commas, as CSV.",
    ".txt": 'Write a JSON value per line, a task {"question": "…"} or a chat {"messages": […]}, and call it .jsonl.',
    **dict.fromkeys((".yaml", ".yml", ".toml", ".pkl", ".py"), "Write them as JSON lines, or give a list of tasks."),
}
"""What to do with files of other kinds."""
_LOOKED_AT = 512
_BEGINNINGS = {
    b"pk\x03\x04": "a zip archive or an Excel sheet, whatever its name says. Unpack it, or save the sheet as CSV.",
    b"\x1f\x8b": "compressed by gzip, whatever its name says. Unpack it first:  gunzip -c FILE > tasks.jsonl",
    b"par1": "Parquet, whatever its name says: let its name end in .parquet.",
    **dict.fromkeys(
        (b"<!doctype html", b"<html"),
        "a web page, not the data. Download the file itself, on most sites by the link called raw or download.",
    ),
}
"""How files of other kinds begin, and what is said of them."""
