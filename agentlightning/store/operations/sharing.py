"""Tokens and texts that calls of several attempts have in common: stored with one of them, and read by all.

A row of `segments` or `spans` may name its *source*: the row of another attempt in which the same was recorded. What
the store has for that source already is not stored again, and read from there: from the first row with the same source
that holds it, or else from the source itself. Whoever writes a row sends all of it in any case, and only what is equal
is left out, so that nobody reads what is another's by naming it. A source never reads from another source itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import ColumnElement, Table, bindparam, func, select, update

from agentlightning.errors import StoreError
from agentlightning.store.database.schema import attempts
from agentlightning.store.database.transaction import IDS_PER_QUERY, Row, Statement, Transaction

RowSource = tuple[str, str]
"""An attempt's id and that of one of its rows."""


def missing_source(what: str, source: RowSource) -> StoreError:
    """The error of a row that has something from a source that is not there."""
    return StoreError(
        f"{what} '{source[1]}' of attempt '{source[0]}', which is missing in the store. Something else than the store "
        "has changed the database."
    )


class SharedRows:
    """A table whose rows may leave the `shared` columns to their source; the first of these is empty then.

    own, source: the columns with a row's own id and with that of its source, beside `source_attempt`.
    original, read: of a row without a source, the columns that hold what is shared, and how it is read from them.
    """

    def __init__(
        self,
        table: Table,
        *,
        own: str,
        source: str,
        shared: Sequence[str],
        original: Sequence[str] | None = None,
        read: Callable[[Row], Row] = lambda row: row,
    ) -> None:
        t = self._t = table.c
        self._table = table
        self._key, self._source = (t.attempt_id, t[own]), (t.source_attempt, t[source])
        self._shared, self._original, self._read = shared, [t[name] for name in original or shared], read
        self._columns = [t[name] for name in shared]
        self._holds: ColumnElement[bool] = func.coalesce(func.length(self._columns[0]), 0) > 0
        attempt, row = bindparam("attempt"), bindparam("row")
        by_source = self._source[0] == attempt, self._source[1] == row
        by_key = *self._of_attempts(attempts.c.attempt_id == attempt), self._key[0] == attempt, self._key[1] == row
        # They are locked where several stores write at the same time, so that none is deleted before who refers to it
        # is stored (`hand_over`).
        holder = select(*self._columns).where(*by_source, self._holds).order_by(t.seq).limit(1)
        named = select(*self._source, *self._original).where(*by_key)
        self._holder = Statement(holder.with_for_update(read=True, key_share=True))
        self._named = Statement(named.with_for_update(read=True, key_share=True))

    def _of_attempts(self, chosen: ColumnElement[bool]) -> list[ColumnElement[bool]]:
        """What finds the rows of attempts by index, where that begins with the rollout."""
        if "rollout_id" not in self._t:
            return []
        return [self._t.rollout_id.in_(select(attempts.c.rollout_id).where(chosen))]

    def without_shared(self, tx: Transaction, source: RowSource, own: Row) -> tuple[RowSource | None, Row]:
        """The source and the shared columns of a new row, which are empty if the source has the same."""
        named = tx.row(self._named, {"attempt": source[0], "row": source[1]})
        if named is not None and named[0] is not None:
            source = named[0], named[1]
        held = self.held(tx, source)
        if held is None:
            return source, own
        return (source, self._nothing(own)) if held == own else (None, own)

    @staticmethod
    def _nothing(own: Row) -> Row:
        return (b"" if isinstance(own[0], bytes) else None, *[None] * (len(own) - 1))

    def held(self, tx: Transaction, source: RowSource) -> Row | None:
        """What the rows with a source have from it; None if it is not there."""
        given = {"attempt": source[0], "row": source[1]}
        if (row := tx.row(self._holder, given)) is not None:
            return tuple(row)
        row = tx.row(self._named, given)
        return None if row is None else self._read(tuple(row[2:]))

    def all_held(self, tx: Transaction, sources: Sequence[RowSource]) -> dict[RowSource, Row]:
        """The same of many sources, but for those that are not there."""
        found: dict[RowSource, Row] = {}
        for start in range(0, len(sources), IDS_PER_QUERY):
            some = sources[start : start + IDS_PER_QUERY]
            names, rows = {attempt for attempt, _ in some}, {row for _, row in some}
            scope = self._of_attempts(attempts.c.attempt_id.in_(names))
            originals = select(*self._key, *self._original).where(
                *scope, self._key[0].in_(names), self._key[1].in_(rows)
            )
            found |= {(attempt, row): self._read(tuple(rest)) for attempt, row, *rest in tx.select(originals)}
            holders = (
                select(*self._source, *self._columns)
                .where(self._source[0].in_(names), self._source[1].in_(rows), self._holds)
                .order_by(self._t.seq.desc())  # so that the first one is the last that is put into the dict
            )
            found |= {(attempt, row): tuple(rest) for attempt, row, *rest in tx.select(holders)}
        return found

    def hand_over(self, tx: Transaction, attempt_ids: Sequence[str], gone: ColumnElement[bool]) -> None:
        """Before the rows of attempts are deleted, which `gone` finds by index, give what rows of others have from them
        to the first of those."""
        locked = select(self._t.seq).where(gone).with_for_update().subquery()
        tx.select(select(func.count()).select_from(locked))
        has_source = self._source[0].is_not(None)
        if not tx.select(select(self._t.seq).where(has_source).limit(1)):
            return
        source = select(*self._source).distinct()
        wanted = tx.select(source.where(self._source[0].in_(attempt_ids), ~gone))
        wanted += tx.select(source.where(gone, has_source, self._holds))
        for attempt, row in dict.fromkeys(map(tuple, wanted)):
            self._give(tx, (attempt, row), ~gone)

    def _give(self, tx: Transaction, source: RowSource, left: ColumnElement[bool]) -> None:
        """Give what a source has to the first row that is left and reads it from there, unless one holds it."""
        of_source = self._source[0] == source[0], self._source[1] == source[1]
        first = select(self._t.seq, self._holds).where(*of_source, left).order_by(self._holds.desc(), self._t.seq)
        held = self.held(tx, source)
        while held is not None and (found := tx.select(first.limit(1))) and not found[0][1]:
            values: dict[str, Any] = dict(zip(self._shared, held, strict=True))
            if tx.change(update(self._table).where(self._t.seq == found[0][0]).values(**values)):
                return  # otherwise another store has deleted it meanwhile
