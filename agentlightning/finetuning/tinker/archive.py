"""What training clients saved: folders of weights, and a row for each in the server's records.

A folder is whole before its row is there, and its row is gone before the folder is, so a server that is killed at any
moment leaves no checkpoint that cannot be loaded. A path names one: `tinker://RUN/KIND/NAME`.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from agentlightning.files import atomic_directory, folder_bytes, make_folder
from agentlightning.finetuning.records import Records, Row
from agentlightning.gateway.exchange import Refusal
from agentlightning.reading import whole_number

SCHEME = "tinker://"
KINDS: Mapping[str, str] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""The middle part of a path, and what the API calls a checkpoint of that kind."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,127}")
_LIFETIME = (3600, 10 * 365 * 86400)
_TABLES = """
CREATE TABLE IF NOT EXISTS tinker_runs (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, session TEXT, base TEXT, rank INTEGER,
    parts TEXT, metadata TEXT, created_at REAL, last_request_at REAL);
CREATE TABLE IF NOT EXISTS tinker_checkpoints (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT UNIQUE, owner TEXT, run TEXT, kind TEXT, name TEXT, bytes INTEGER,
    metadata TEXT, public INTEGER DEFAULT 0, created_at REAL, expires_at REAL);
CREATE INDEX IF NOT EXISTS tinker_runs_of_owner ON tinker_runs (owner);
CREATE INDEX IF NOT EXISTS tinker_checkpoints_of_owner ON tinker_checkpoints (owner);
"""


@dataclass(frozen=True)
class SavedWeights:
    """A checkpoint."""

    row: Row
    folder: Path
    run: Row

    @property
    def adapter(self) -> Path:
        return self.folder / "model"

    @property
    def optimizer(self) -> Path:
        return self.folder / "optimizer"


class Archive:
    """The checkpoints of all runs."""

    def __init__(self, records: Records, folder: Path, deleted: Callable[[Path], None]) -> None:
        """`deleted` is called with each folder before it goes."""
        self._records = records
        self.folder = folder
        self._deleted = deleted
        self.check_quota: Callable[[str], None] = lambda owner: None
        """Raises `Refusal` where a key may not have further checkpoints."""
        records.define(_TABLES)
        make_folder(folder)
        self._remove_remains()

    def _remove_remains(self) -> None:
        """What a server that was killed left: folders without a row, half-written ones, and unnamed ones."""
        known = {self._place(row) for row in self._records.rows("SELECT * FROM tinker_checkpoints")}
        for place in self.folder.glob("*/*/*"):
            if place not in known:
                shutil.rmtree(place, ignore_errors=True)

    # ---- runs ------------------------------------------------------------------------------------------------------

    def check_run(self, owner: str, run: str) -> None:
        """Raises `Refusal` where the run would be a further one, and the key may have no more."""
        if self._records.row("SELECT id FROM tinker_runs WHERE id = ?", run) is None:
            self._records.check_more("tinker_runs", owner)

    def add_run(
        self, owner: str, run: str, session: str, base: str, rank: int, parts: list[str], metadata: Any
    ) -> None:
        now = time.time()
        known = self._records.row("SELECT base FROM tinker_runs WHERE id = ?", run)
        if known is not None and known["base"] != base:
            raise Refusal(f"The run '{run}' is of {known['base']}, not of {base}.", param="model_seq_id")
        if known is not None:  # other weights were loaded into it
            self._records.change("tinker_runs", run, rank=rank, parts=" ".join(parts))
        self._records.add(
            "tinker_runs",
            id=run,
            owner=owner,
            session=session,
            base=base,
            rank=rank,
            parts=" ".join(parts),
            metadata=msgspec.json.encode(metadata).decode(),
            created_at=now,
            last_request_at=now,
        )

    def touch(self, run: str) -> None:
        """Something was asked of it."""
        self._records.change("tinker_runs", run, last_request_at=time.time())

    def run(self, owner: str, run: str) -> dict[str, Any]:
        """Raises `Refusal` where the key has none of this id."""
        row = self._records.row("SELECT * FROM tinker_runs WHERE id = ? AND owner = ?", run, owner)
        if row is None:
            raise _missing("training run", run)
        return self._seen_run(row)

    def runs(self, owner: str, query: Mapping[str, str]) -> dict[str, Any]:
        rows, cursor = self._page("tinker_runs", "owner = ?", [owner], query)
        return {"training_runs": [self._seen_run(row) for row in rows], "cursor": cursor}

    def _seen_run(self, row: Row) -> dict[str, Any]:
        last = "SELECT * FROM tinker_checkpoints WHERE run = ? AND kind = ? ORDER BY seq DESC LIMIT 1"
        newest = {kind: self._records.row(last, row["id"], kind) for kind in ("weights", "sampler_weights")}
        shown = {kind: None if found is None else seen(found) for kind, found in newest.items()}
        return {
            "training_run_id": row["id"],
            "base_model": row["base"],
            "model_owner": row["owner"],
            "is_lora": True,
            "lora_rank": row["rank"],
            "last_request_time": _moment(row["last_request_at"]),
            "last_checkpoint": shown["weights"],
            "last_sampler_checkpoint": shown["sampler_weights"],
            "user_metadata": msgspec.json.decode(row["metadata"]),
        }

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def check_new(self, run: str, kind: str, name: str, lifetime: int | None, *, overwrite: bool = True) -> None:
        """Raises `Refusal` for a name that cannot be one or is taken, and for a lifetime out of bounds."""
        if _NAME.fullmatch(name) is None:
            raise Refusal(
                f"The name is {name[:200]!r}; it has up to 128 letters, digits and . _ -, and begins "
                "with a letter, a digit or _.",
                param="path",
            )
        if lifetime is not None and not _LIFETIME[0] <= lifetime <= _LIFETIME[1]:
            raise Refusal(
                f"ttl_seconds is {lifetime}; it is from {_LIFETIME[0]} to {_LIFETIME[1]}.", param="ttl_seconds"
            )
        if not overwrite and self._row(f"{SCHEME}{run}/{kind}/{name}") is not None:
            raise Refusal(f"There is a checkpoint '{name}' already; give overwrite=True or another name.", param="path")

    async def save(
        self,
        owner: str,
        run: str,
        kind: str,
        name: str,
        write: Callable[[Path], Awaitable[None]],
        *,
        lifetime: int | None = None,
        metadata: Any = None,
    ) -> Row:
        """Have a checkpoint written into a folder of its own, and keep it under its path.

        Raises `Refusal` where the key's checkpoints take what they may.
        """
        self.check_quota(owner)
        path = f"{SCHEME}{run}/{kind}/{name}"
        place = self._place({"run": run, "kind": kind, "name": name})
        if self._row(path) is not None:
            self._deleted(place)
        else:
            self._records.check_more("tinker_checkpoints", owner)
        with atomic_directory(place) as work:
            await write(work)
        size = await asyncio.to_thread(folder_bytes, place)
        now = time.time()
        with self._records.transaction():
            self._records.remove("tinker_checkpoints", path)
            self._records.add(
                "tinker_checkpoints",
                id=path,
                owner=owner,
                run=run,
                kind=kind,
                name=name,
                bytes=size,
                metadata=msgspec.json.encode(metadata).decode(),
                created_at=now,
                expires_at=None if lifetime is None else now + lifetime,
            )
        found = self._row(path)
        assert found is not None
        return found

    def stored_bytes(self, owner: str) -> int:
        """What the checkpoints of a key take."""
        found = self._records.row("SELECT coalesce(sum(bytes), 0) AS n FROM tinker_checkpoints WHERE owner = ?", owner)
        assert found is not None
        return found["n"]

    def find(self, owner: str, path: str) -> SavedWeights:
        """A checkpoint of the key's own, or one that its owner published. Raises `Refusal`."""
        row = self._row(path)
        if row is None or (row["owner"] != owner and not row["public"]):
            raise _missing("checkpoint", path)
        run = self._records.row("SELECT * FROM tinker_runs WHERE id = ?", row["run"])
        assert run is not None, "a run is added before it saves anything"
        return SavedWeights(row, self._place(row), run)

    def own(self, owner: str, run: str, checkpoint: str) -> Row:
        """Raises `Refusal` where it is not the key's."""
        row = self._row(f"{SCHEME}{run}/{checkpoint}")
        if row is None or row["owner"] != owner:
            raise _missing("checkpoint", f"{run}/{checkpoint}")
        return row

    def list(self, owner: str, query: Mapping[str, str], run: str | None = None) -> dict[str, Any]:
        """The checkpoints of a run, all at once; or those of a key, by pages."""
        self.sweep()
        if run is not None:
            self.run(owner, run)
            rows = self._records.rows("SELECT * FROM tinker_checkpoints WHERE run = ? ORDER BY seq DESC", run)
            return {"checkpoints": [seen(row) for row in rows]}
        rows, cursor = self._page("tinker_checkpoints", "owner = ?", [owner], query)
        return {"checkpoints": [seen(row) for row in rows], "cursor": cursor}

    def change(self, row: Row, **values: Any) -> None:
        self._records.change("tinker_checkpoints", row["id"], **values)

    def delete(self, row: Row) -> None:
        self._records.remove("tinker_checkpoints", row["id"])
        place = self._place(row)
        self._deleted(place)
        shutil.rmtree(place, ignore_errors=True)

    def sweep(self) -> None:
        """Delete those whose time is over."""
        for row in self._records.rows("SELECT * FROM tinker_checkpoints WHERE expires_at < ?", time.time()):
            self.delete(row)

    def unnamed(self, run: str, name: str) -> Path:
        """Where weights go that only one session samples from; `drop` removes them."""
        return self.folder / _folder_of(run) / "unnamed" / name

    def drop(self, place: Path) -> None:
        self._deleted(place)
        shutil.rmtree(place, ignore_errors=True)

    def _row(self, path: str) -> Row | None:
        sql = "SELECT * FROM tinker_checkpoints WHERE id = ? AND (expires_at IS NULL OR expires_at >= ?)"
        return self._records.row(sql, path, time.time())

    def _place(self, row: Mapping[str, Any]) -> Path:
        return self.folder / _folder_of(row["run"]) / row["kind"] / row["name"]

    def _page(
        self, table: str, where: str, values: list[Any], query: Mapping[str, str]
    ) -> tuple[list[Row], dict[str, int]]:
        limit, offset = number_in(query, "limit", 20, 1, 1000), number_in(query, "offset", 0, 0, 1 << 40)
        count = self._records.row(f"SELECT count(*) AS n FROM {table} WHERE {where}", *values)
        assert count is not None
        sql = f"SELECT * FROM {table} WHERE {where} ORDER BY seq DESC LIMIT ? OFFSET ?"
        cursor = {"offset": offset, "limit": limit, "total_count": count["n"]}
        return self._records.rows(sql, *values, limit, offset), cursor


def number_in(query: Mapping[str, str], name: str, default: int, low: int, high: int) -> int:
    """A number of the query. Raises `Refusal` for what is none."""
    given = query.get(name)
    if given is None:
        return default
    if (found := whole_number(given)) is None or not low <= found <= high:
        raise Refusal(f"{name} is {given[:50]!r}; it is a number from {low} to {high}.", param=name)
    return found


def seen(row: Row) -> dict[str, Any]:
    """A checkpoint as clients see it."""
    return {
        "checkpoint_id": f"{row['kind']}/{row['name']}",
        "checkpoint_type": KINDS[row["kind"]],
        "time": _moment(row["created_at"]),
        "tinker_path": row["id"],
        "size_bytes": row["bytes"],
        "public": bool(row["public"]),
        "user_metadata": msgspec.json.decode(row["metadata"]),
        "expires_at": None if row["expires_at"] is None else _moment(row["expires_at"]),
    }


def _moment(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _folder_of(run: str) -> str:
    return run.replace(":", "-")


def _missing(what: str, name: str) -> Refusal:
    """The refusal of what there is not, or is another key's: nobody learns which."""
    return Refusal(f"There is no {what} '{name[:200]}'.", status=404, code="not_found")
