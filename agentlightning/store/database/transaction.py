"""What an operation of the store sees of a database: compiled statements to run, and a place to note what it changed.

An operation is a plain function `op(tx) -> result`. It knows neither threads nor which database it runs on, and it may
be run again from the start if its transaction was rolled back.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from sqlalchemy import Boolean, ColumnElement, bindparam
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.interfaces import Dialect
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql import ClauseElement

Row = tuple[Any, ...]
Parameters = Mapping[str, Any]
T_co = TypeVar("T_co", covariant=True)

IDS_PER_QUERY = 5000
"""For IN lists: SQLite allows 32766 parameters in a statement."""

DIALECTS: dict[str, Dialect] = {
    "sqlite": sqlite.dialect(paramstyle="named"),
    "postgresql": postgresql.dialect(paramstyle="pyformat"),
}
_INSERTS: dict[str, Callable[..., Any]] = {"sqlite": sqlite.insert, "postgresql": postgresql.insert}


class Ids(list[str]):
    """Many ids as the value of one parameter; see `among`."""


class among(ColumnElement[bool]):  # named as it reads in a statement
    """Whether a column is one of the `Ids` that a parameter holds: one statement, however many they are."""

    inherit_cache = False
    type = Boolean()

    def __init__(self, column: ColumnElement[str], parameter: str) -> None:
        self.column = column
        self.ids = bindparam(parameter)

    def self_group(self, against: Any = None) -> among:
        return self  # it is a condition as it is: SQLite would not find by index what is compared with 1


@compiles(among, "sqlite")
def _among_in_sqlite(element: among, compiler: Any, **keywords: Any) -> str:
    column, ids = (compiler.process(part, **keywords) for part in (element.column, element.ids))
    return f"{column} IN (SELECT value FROM json_each({ids}))"


@compiles(among, "postgresql")
def _among_in_postgresql(element: among, compiler: Any, **keywords: Any) -> str:
    column, ids = (compiler.process(part, **keywords) for part in (element.column, element.ids))
    return f"{column} = ANY({ids})"


class Statement:
    """A SQLAlchemy statement, compiled once per dialect.

    `build` is the statement, or for upserts a function from the dialect's `insert` to the statement. `columns` are
    the columns that an INSERT or UPDATE sets from parameters of the same name.
    """

    __slots__ = ("_build", "_columns", "_texts")

    def __init__(self, build: ClauseElement | Callable[[Any], ClauseElement], columns: Iterable[str] | None = None):
        self._build = build
        self._columns = list(columns) if columns is not None else None
        self._texts: dict[str, str] = {}

    def text(self, dialect: str) -> str:
        text = self._texts.get(dialect)
        if text is None:
            element = self._build if isinstance(self._build, ClauseElement) else self._build(_INSERTS[dialect])
            compiled = element.compile(dialect=DIALECTS[dialect], column_keys=self._columns)
            text = self._texts[dialect] = _inline_numbers(str(compiled), compiled.params or {})
        return text


def _inline_numbers(text: str, parameters: Parameters) -> str:
    """Write the numbers of a LIMIT or an OFFSET into the text: all parameters left are given when it runs."""
    for name, value in parameters.items():
        assert not isinstance(value, str | float), f"the statement has a value of its own, {name}={value!r}"
        if type(value) is int:
            text = re.sub(rf":{name}\b|%\({name}\)s(::\w+)?", str(value), text)
    return text


class Changes:
    """What an operation did that others must hear of once it is committed."""

    __slots__ = ("counts", "finished", "queued")

    def __init__(self) -> None:
        self.counts: defaultdict[str, int] = defaultdict(int)
        self.finished: list[str] = []
        """Rollouts that reached a final status."""
        self.queued: Counter[str | None] = Counter()
        """How many rollouts became claimable, by run; None: of no run."""

    def merge(self, other: Changes) -> None:
        for name, delta in other.counts.items():
            self.counts[name] += delta
        self.finished.extend(other.finished)
        self.queued.update(other.queued)

    def moved(self, noun: str, old: str | None, new: str) -> None:
        """Count one rollout or attempt that left status `old` (None: is new) for `new`."""
        if old is not None:
            self.counts[f"{noun}.{old}"] -= 1
        self.counts[f"{noun}.{new}"] += 1


class Transaction(Protocol):
    """An open transaction. `now` is the same for a whole operation."""

    now: float
    changes: Changes

    def row(self, statement: Statement, parameters: Parameters) -> Row | None: ...

    def rows(self, statement: Statement, parameters: Parameters) -> list[Row]: ...

    def run(self, statement: Statement, parameters: Parameters) -> int:
        """Execute and return the number of rows it changed."""
        ...

    def many(self, statement: Statement, parameters: Sequence[Parameters]) -> int:
        """Execute once per item and return the number of rows changed."""
        ...

    def each(self, statement: Statement, parameters: Sequence[Parameters]) -> list[int]:
        """Execute once per item and return the number of rows that each changed."""
        ...

    def select(self, element: ClauseElement) -> list[Row]:
        """Run a query that was made for this one call."""
        ...

    def change(self, element: ClauseElement) -> int:
        """Run an UPDATE or DELETE that was made for this one call; returns the number of rows changed."""
        ...


class TransactionOperation(Protocol[T_co]):
    def __call__(self, tx: Transaction, /) -> T_co: ...
