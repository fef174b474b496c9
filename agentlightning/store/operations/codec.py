"""Between records and rows: JSON texts, token arrays, and the records made from rows.

No SQL here. Values that are not JSON are refused with an error that names their type, never stored as something else.
Whatever is written or read is without attempts' keys: agents print what they hold, and people show what is stored.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from agentlightning.errors import StoreError
from agentlightning.keys import redacted
from agentlightning.types import Attempt, AttemptStatus, Outcome, Rollout, RolloutConfig, RolloutMode, RolloutStatus
from agentlightning.types.ids import random_hex
from agentlightning.types.rollout import Record

T = TypeVar("T")
DEFAULT_CONFIG = RolloutConfig()
MAX_DEPTH = 128
"""How deep a task may be nested."""


def new_id(prefix: str) -> str:
    """A unique id that grows with time, so that the indexes over ids grow at their end."""
    return f"{prefix}-{time.time_ns() // 1_000_000:011x}{random_hex(5)}"


_ID = re.compile(r"[^/?#%\x00-\x1f\x7f\ud800-\udfff]{1,500}")
_RESERVED = (".", "..", "latest", "search")


def checked_id(value: str, what: str) -> str:
    """An id given by the caller. Ids stand in URLs, the agents' too, where some characters mean something else."""
    if value in _RESERVED or not _ID.fullmatch(value):
        raise StoreError(
            f"{what} cannot be {value[:80]!r}: ids stand in URLs. Use 1 to 500 characters, none of them / ? # % or a "
            f"control character, and none of {', '.join(_RESERVED)}."
        )
    return value


def encode_task(value: Any, what: str) -> str:
    """A JSON value given by the user; strict, because what comes back must be what was given."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        if not text.isascii():
            text.encode()  # refuses half a surrogate pair, which no database can store
        _check_depth(value, text)
        return redacted(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{what} must be a JSON value (dict, list, str, number, bool, None): {error}. {_mended(error)}"
        ) from error


_AS_JSON = {
    **dict.fromkeys(("date", "datetime", "time", "Timestamp"), "text: value.isoformat()"),
    **dict.fromkeys(
        ("bytes", "bytearray", "memoryview"), "text, or as the path of a file: base64.b64encode(value).decode()"
    ),
    **dict.fromkeys(
        ("set", "frozenset", "dict_keys", "dict_values", "deque", "map", "generator"), "a list: list(value)"
    ),
    **dict.fromkeys(("Decimal", "Fraction"), "a number, float(value), or as text, str(value)"),
    **dict.fromkeys(("UUID", "PosixPath", "WindowsPath", "Path", "timedelta"), "text: str(value)"),
    **dict.fromkeys(
        ("Tensor", "ndarray", "Array", "EagerTensor"),
        "lists and numbers: value.tolist(). A datasets.Dataset has them without a format: dataset.with_format(None)",
    ),
    "Series": "a dict: value.to_dict(). A DataFrame's rows are df.to_dict('records')",
    **dict.fromkeys(("complex",), "a list of two numbers: [value.real, value.imag]"),
    "Image": "text: the path of its file, or its bytes in base64",
}
"""How values of other kinds are written as JSON."""


def _mended(error: Exception) -> str:
    if "float values" in str(error):
        return "JSON has no NaN and no infinity: put None in their place, in a pandas frame before to_dict('records')."
    kind = re.search(r"of type (\w+) is not JSON", str(error))
    if kind and kind[1] in _AS_JSON:
        return f"Write it as {_AS_JSON[kind[1]]}."
    return "Convert it first, for example with .model_dump(), dataclasses.asdict() or .tolist()."


def _check_depth(value: Any, text: str) -> None:
    """Raise ValueError for a value that can be written but not be sent: JSON readers stop at some depth."""
    if text.count("[") + text.count("{") <= MAX_DEPTH:
        return
    level = [value] if isinstance(value, dict | list | tuple) else []
    for _ in range(MAX_DEPTH):
        level = [item for outer in level for item in (outer.values() if isinstance(outer, dict) else outer)]
        level = [item for item in level if isinstance(item, dict | list | tuple)]
        if not level:
            return
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def _plain(value: Any) -> Any:
    """Records, and the numbers and arrays of numpy that instrumentations like to put in attributes, as JSON values."""
    if isinstance(value, Record):
        return value.__dict__
    if hasattr(value, "tolist"):
        return value.tolist()
    raise StoreError(f"A value of type {type(value).__name__} is not JSON; convert it before it goes into the store.")


_encoder = msgspec.json.Encoder(enc_hook=_plain)


def encode(value: Any) -> str:
    """JSON written by the program (attributes, statistics)."""
    try:
        return redacted(_encoder.encode(value).decode())
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"Not a JSON value: {error}. Convert it before it goes into the store.") from error


def readable(text: str) -> str:
    """Text that somebody else wrote, as every database takes it: NUL and half surrogate pairs as question marks."""
    return redacted(text.replace("\0", "?").encode("utf-8", "replace").decode())


def encode_seen(value: Any) -> str:
    """As `encode`, for what was seen of agents (spans): text that is no Unicode is made readable, not refused."""
    try:
        return redacted(_encoder.encode(value).decode())
    except UnicodeEncodeError:
        return encode(_readable(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(f"Not a JSON value: {error}. Convert it before it goes into the store.") from error


def _readable(value: Any) -> Any:
    if isinstance(value, str):
        return readable(value)
    if isinstance(value, Record):
        value = value.__dict__
    if isinstance(value, Mapping):
        return {_readable(key): _readable(item) for key, item in value.items()}
    return [_readable(item) for item in value] if isinstance(value, list | tuple) else value


def decode(text: str, column: str, key: object, *, type: Any = Any) -> Any:
    """What a column of JSON holds in the row with this key; older versions wrote keys into some.

    Raises StoreError where that is damaged; it names the column (as table.column) and the row.
    """
    try:
        return msgspec.json.decode(redacted(text), type=type)
    except (msgspec.DecodeError, TypeError, RecursionError) as error:
        raise StoreError(
            f"{column} of '{key}' is damaged in the store: {error}. Keep a copy of the store, and repair or delete "
            "that row."
        ) from error


def of_row(found: Mapping[str, T], key: str, what: str) -> T:
    """What there is for the id that a row has. Raises StoreError where a damaged index led to a row of another id."""
    if key not in found:
        raise StoreError(
            f"An index of the store is damaged: it leads to {what} of '{key}', which is none of those that were looked "
            "for. Keep a copy of the store, then try `sqlite3 FILE REINDEX` (PostgreSQL: REINDEX DATABASE)."
        )
    return found[key]


def encode_metadata(metadata: Mapping[str, Any] | None) -> str | None:
    return encode_task(metadata, "metadata") if metadata else None


def encode_config(config: RolloutConfig | None) -> str | None:
    return None if config is None or config == DEFAULT_CONFIG else config.model_dump_json()


def decode_config(text: str | None) -> RolloutConfig:
    return DEFAULT_CONFIG if text is None else RolloutConfig.model_validate_json(text)


ROLLOUT_FIELDS = (
    "rollout_id",
    "input",
    "start_time",
    "end_time",
    "mode",
    "resources_id",
    "status",
    "config",
    "metadata",
    "run_id",
)
ATTEMPT_FIELDS = (
    "rollout_id",
    "attempt_id",
    "sequence_id",
    "start_time",
    "end_time",
    "status",
    "worker_id",
    "last_heartbeat_time",
    "outcome",
    "error",
    "metadata",
)


def _seconds(time: Any) -> Any:
    """A time as it is; SQLite keeps texts in columns of numbers, too. Raises ValueError for those."""
    if time is None or isinstance(time, int | float):
        return time
    raise ValueError(f"{str(time)[:40]!r} is no time")


def rollout_values(row: Sequence[Any]) -> dict[str, Any]:
    """The fields of a `Rollout` from a row of `ROLLOUT_FIELDS`."""
    rollout_id, input, start_time, end_time, mode, resources_id, status, config, metadata, run_id = row
    return {
        "rollout_id": rollout_id,
        "input": decode(input, "rollouts.input", rollout_id),
        "start_time": _seconds(start_time),
        "end_time": _seconds(end_time),
        "mode": RolloutMode(mode) if mode is not None else None,
        "resources_id": resources_id,
        "status": RolloutStatus(status),
        "config": decode_config(config),
        "metadata": decode(metadata, "rollouts.metadata", rollout_id, type=dict[str, Any]) if metadata else {},
        "run_id": run_id,
    }


def to_rollout(row: Sequence[Any]) -> Rollout:
    return Rollout.model_construct(**rollout_values(row))


def to_attempt(row: Sequence[Any]) -> Attempt:
    """An `Attempt` from a row of `ATTEMPT_FIELDS`."""
    rollout_id, attempt_id, sequence_id, start, end, status, worker_id, heartbeat, outcome, error, metadata = row
    return Attempt.model_construct(
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        sequence_id=sequence_id,
        start_time=_seconds(start),
        end_time=_seconds(end),
        status=AttemptStatus(status),
        worker_id=worker_id,
        last_heartbeat_time=_seconds(heartbeat),
        outcome=Outcome(outcome) if outcome is not None else None,
        error=error and redacted(error),
        metadata=decode(metadata, "attempts.metadata", attempt_id, type=dict[str, Any]) if metadata else {},
    )
