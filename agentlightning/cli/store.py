"""`agl store`: serve a store, look at it, move it, forget old rollouts."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from shlex import quote

from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

import agentlightning.dashboard as dashboard
from agentlightning.cli.interrupt import interrupted
from agentlightning.console import Console
from agentlightning.errors import ConfigError, StoreError, StoreUnavailableError
from agentlightning.files import meant_by, open_private
from agentlightning.keys import ALL_SCOPES, new_secret, sign_attempt_key
from agentlightning.net.local_keys import kept_key, made_key
from agentlightning.store import (
    InMemoryLightningStore,
    PostgresLightningStore,
    SqliteLightningStore,
)
from agentlightning.store.base import LightningStore, Statistics
from agentlightning.store.sql import SqlLightningStore
from agentlightning.store.transfer.records import Record, from_line, to_line
from agentlightning.trainer.folder import RUN_FILE, STORE_FILE
from agentlightning.trainer.live import announced, connect, served_file
from agentlightning.trainer.sync import run_sync
from agentlightning.types.finding import counted
from agentlightning.types.status import FINISHED_ROLLOUT

console = Console(highlight=False, soft_wrap=True)

DEFAULT_PATH = Path("store.db")
OTHERS_SECONDS = 20.0
"""How long a command that looks at a store waits for others that do."""
UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@dataclass(frozen=True)
class Location:
    """Where the store is: a SQLite file, or a PostgreSQL database."""

    path: Path | None
    dsn: str | None
    backend: str | None = None
    """sqlite, postgres or memory, where it was said; None is what the two others say."""

    def __post_init__(self) -> None:
        if self.backend == "mongo":
            raise ConfigError("MongoDB is not supported. Several machines share PostgreSQL: --dsn postgresql://…")
        if self.backend not in (None, "sqlite", "postgres", "memory"):
            raise ConfigError(f"--backend is '{self.backend}'; it can be sqlite, postgres or memory.")
        if self.dsn is not None and "://" in self.dsn and not self.dsn.startswith(("postgresql://", "postgres://")):
            raise ConfigError("--dsn begins with postgresql://, since it is for PostgreSQL; --path is for SQLite.")
        if self.backend == "postgres" and self.dsn is None:
            raise ConfigError("--backend postgres needs --dsn postgresql://user:password@host/db.")
        if self.dsn is not None and self.backend in ("sqlite", "memory"):
            raise ConfigError(f"--dsn is PostgreSQL, and --backend says {self.backend}. Leave one of them out.")
        if self.path is not None and self.backend == "memory":
            raise ConfigError("A store in memory has no file: leave --path out.")
        if self.path is not None and (url := _address(self.path)):
            raise ConfigError(
                f"--path is a file, and {url} an address. A served store is shown by  agl dashboard {url}"
            )
        if self.path is not None and re.match("postgres(ql)?:/", str(self.path)):
            raise ConfigError("--path is a file. A store in PostgreSQL is given by --dsn postgresql://…")
        if self.path is not None and self.path.is_dir():
            raise ConfigError(f"--path {self.path} is a folder, and a store is a file: --path {self.path / STORE_FILE}")
        if self.path is not None and self.dsn is not None:
            raise ConfigError("Give --path or --dsn, not both.")

    @asynccontextmanager
    async def opened(self, *, create: bool = False) -> AsyncIterator[SqlLightningStore]:
        if self.dsn is not None:
            store: SqlLightningStore = PostgresLightningStore(self.dsn)
        elif self.backend == "memory":
            store = InMemoryLightningStore()
        else:
            path = self.path or DEFAULT_PATH
            if not create and not path.exists():
                raise ConfigError(f"There is no store '{path}'. Give its file with --path, or --dsn for PostgreSQL.")
            await self._refuse_if_live(path)
            store = SqliteLightningStore(path)
        try:
            yield store
        finally:
            await store.close()

    @asynccontextmanager
    async def reading(self) -> AsyncIterator[LightningStore]:
        """To look at: of a run that goes on through its own server, of a store that somebody looks at already through
        theirs, else as `opened`."""
        path = self.path or DEFAULT_PATH
        live = None
        if self.dsn is None:
            of_run = path.name == STORE_FILE and await connect(path.parent)
            live = of_run or await connect(path.parent, served_file(path))
        if live is None:
            async with AsyncExitStack() as stack:
                yield await self._when_free(stack)
            return
        try:
            yield live
        finally:
            await live.close()

    async def _when_free(self, stack: AsyncExitStack) -> SqlLightningStore:
        """As `opened`; another command that looks at it too is waited for."""
        end = time.monotonic() + OTHERS_SECONDS
        while True:
            try:
                return await stack.enter_async_context(self.opened())
            except StoreUnavailableError as error:
                if not isinstance(error.__cause__, BlockingIOError) or time.monotonic() > end:
                    raise
            await asyncio.sleep(0.1)

    async def _refuse_if_live(self, path: Path) -> None:
        live = await connect(path.parent)
        if live is not None:
            await live.close()
            run = quote(str(path.parent))
            raise ConfigError(
                f"The run in {path.parent} is going on, and only it may change its store. Look at it with "
                f"`agl show {run}` or `agl store statistics {run}`, or wait until it is over."
            )

    def __str__(self) -> str:
        if self.backend == "memory":
            return "in memory"
        return re.sub(r"//([^:@/]*):[^@/]*@", r"//\1:…@", self.dsn) if self.dsn else str(self.path or DEFAULT_PATH)


def refuse_older(cors_origin: list[str] | None, tracker: list[str] | None, n_workers: int) -> None:
    """Raises ConfigError for options of 0.3 that would have no effect; `--tracker prometheus` is always so."""
    if cors_origin:
        raise ConfigError(
            "--cors-origin has no effect: the dashboard comes from the store's own address, and programs need no "
            "leave. Leave it out; for a page of your own, put a proxy in front that adds the headers."
        )
    if set(tracker or ()) - {"prometheus"}:
        raise ConfigError("--tracker can be prometheus only: the counters are at /metrics of the store, always.")
    if n_workers != 1:
        raise ConfigError(
            f"--n-workers is {n_workers}, and one process serves a store. Leave it out; to share the load, start "
            "several `agl store --dsn postgresql://…` on one database."
        )


def log_at(level: str) -> None:
    """Show the log from this level on."""
    known = logging.getLevelNamesMapping().get(level.upper())
    if known is None:
        raise ConfigError(f"--log-level is '{level}'; it can be DEBUG, INFO, WARNING or ERROR.")
    logging.basicConfig(level=known, format="%(asctime)s %(levelname)s %(name)s  %(message)s")


def location_of(run: Path) -> Location:
    """The store of a run's folder, or a store's file. Raises ConfigError where there is none."""
    if url := _address(run):
        raise ConfigError(
            f"{url} is an address, and this reads a run's folder. A served store is shown by  agl dashboard {url}"
        )
    file = run / STORE_FILE if run.is_dir() else run
    if not file.is_file() and (run / RUN_FILE).is_file():
        raise ConfigError(
            f"The run '{run}' has no {STORE_FILE}, which holds its rollouts: copy it here from where the run was. If "
            "it recorded in a served store (--server), they are there. agl runs, compare and serve do without."
        )
    if not file.is_file():
        where = f"in '{run}': it has no {STORE_FILE}" if run.is_dir() else f"'{file}': it does not exist"
        meant = "" if run.is_dir() else meant_by(run)
        inside = max(run.glob(f"*/{STORE_FILE}"), key=lambda found: found.stat().st_mtime, default=None)
        latest = f" The latest run in it is {inside.parent}." if inside is not None else ""
        raise ConfigError(
            f"There is no store {where}.{meant} Give a run's folder, or the file of a store.{latest}{run_around(run)}"
        )
    return Location(file, None)


def as_address(given: Path) -> str:
    """How the address of a server is written, where one was given without http://."""
    url = _address(given)
    return f" A server's address begins with http://, as {url} does." if url else ""


def _address(given: Path) -> str | None:
    """The address of a server that stands in place of a path, which has one slash only; None where it is a path."""
    found = re.fullmatch(r"(https?:/)(.+)|()([\w.-]+:\d{2,5}(?:/.*)?)", str(given))
    if found is None or given.exists():
        return None
    return f"{found[1] or 'http:/'}/{found[2] or found[4]}"


def run_around(place: Path) -> str:
    """Which run a file or a folder belongs to, as a sentence to put behind another; nothing where it is in none."""
    parents = Path(os.path.normpath(place)).parents[:3]  # a/../b is not in a
    around = next((folder for folder in parents if (folder / RUN_FILE).is_file()), None)
    return "" if around is None else f" It is inside the run {around}: give that."


# ---- serving ---------------------------------------------------------------------------------------------------------


def serve(
    location: Location,
    host: str,
    port: int,
    key: str | None,
    secret_file: Path | None,
    allow_hosts: Sequence[str] = (),
    open_to_all: bool = False,
) -> None:
    """Serve until Ctrl-C or SIGTERM. On loopback without a key one is made, unless it is `open_to_all`."""
    if open_to_all and key is not None:
        raise ConfigError("--no-key lets everybody on this machine in, and --key only those who have the key.")
    secret = None if secret_file is None else read_secret(secret_file, create=True)
    made = made_key(key, host, open_to_all=open_to_all)
    run_sync(_serve(location, host, port, key, made, secret, allow_hosts))


async def _serve(
    location: Location,
    host: str,
    port: int,
    key: str | None,
    made: str | None,
    secret: bytes | None,
    allow_hosts: Sequence[str],
) -> None:
    key = made or key
    async with location.opened(create=True) as store, AsyncExitStack() as stack:
        server = dashboard.served_with_dashboard(
            store, host, port, admin_key=key, secret=secret, allow_hosts=allow_hosts
        )
        await server.start()
        stack.enter_context(kept_key(server.port, made))
        owned = location.path if location.dsn is None and location.backend != "memory" else None
        if owned is not None:
            stack.enter_context(announced(owned, server.endpoint, key))
        try:
            console.print(
                f"Serving the store [bold]{location}[/bold] at [bold]{server.endpoint}[/bold]  (Ctrl-C stops)\n"
                f"\n  use it       LightningStoreClient({server.endpoint!r}{', key=…' if key and not made else ''})"
                f"\n  REST         {server.endpoint}/docs"
                f"\n  traces       {server.otlp_traces_endpoint()}  (OTLP over HTTP)"
                f"\n  metrics      {server.endpoint}/metrics"
                f"\n  dashboard    {dashboard.dashboard_url(server.endpoint)}",
                markup=True,
            )
            if made is not None:
                stays = (
                    "made for this start, and found by your programs here; --key gives one that stays, --no-key none"
                )
                console.show_key("  key         ", made, stays)
            await interrupted()
        finally:
            await server.stop()
    console.print("Stopped.")


def read_secret(path: Path, *, create: bool = False) -> bytes:
    """The secret that attempt keys are signed with; a new one is written, readable by its owner only."""
    if not path.exists():
        if not create:
            raise ConfigError(f"There is no secret in '{path}'. `agl store --secret-file {path}` makes one.")
        with open(path, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(new_secret().hex() + "\n")
    try:
        secret = bytes.fromhex(path.read_text().strip())
    except ValueError:
        secret = b""
    if len(secret) < 16:
        raise ConfigError(f"'{path}' holds no secret (at least 32 hexadecimal digits). Delete it to get a new one.")
    return secret


def attempt_key(rollout_id: str, attempt_id: str, scopes: list[str], secret_file: Path) -> str:
    unknown = sorted(set(scopes) - set(ALL_SCOPES))
    if unknown:
        raise ConfigError(f"There is no scope {', '.join(unknown)}; choose from {', '.join(ALL_SCOPES)}.")
    return sign_attempt_key(read_secret(secret_file), rollout_id, attempt_id, scopes or ALL_SCOPES)


# ---- looking and forgetting ------------------------------------------------------------------------------------------


def stats(location: Location, *, as_json: bool = False) -> None:
    found = run_sync(_statistics(location))
    if as_json:
        console.print_json(json.dumps(found))
        return
    table = Table("", "count", title=str(location), show_header=False)
    for noun in ("rollouts", "attempts"):
        table.add_row(f"[bold]{noun}[/bold]", f"[bold]{sum(found[noun].values()):,}[/bold]")
        for status, count in found[noun].items():
            if count:
                table.add_row(f"  {status}", f"{count:,}")
    for noun in ("spans", "calls", "resources", "workers"):
        table.add_row(f"[bold]{noun}[/bold]", f"[bold]{found[f'total_{noun}']:,}[/bold]")
    console.print(table)


async def _statistics(location: Location) -> Statistics:
    async with location.reading() as store:
        return await store.statistics()


def prune(location: Location, older_than: str | None, keep: int | None) -> None:
    if older_than is None and keep is None:
        raise ConfigError("Say what to forget: --older-than 30d, or --keep 100000 for all but the last ones.")
    before = None if older_than is None else time.time() - seconds_of(older_than)
    deleted = run_sync(_prune(location, before, keep))
    console.print(f"Deleted {counted(deleted, 'finished rollout')} with all attempts, spans and calls.")


async def _prune(location: Location, before: float | None, keep: int | None) -> int:
    async with location.opened() as store:
        return await store.prune(finished_before=before, keep=keep)


def seconds_of(duration: str) -> float:
    """`90s`, `15m`, `12h`, `30d`, `2w`."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", duration.strip())
    if found is None:
        raise ConfigError(f"'{duration}' is not a duration; write it like 90s, 15m, 12h, 30d or 2w.")
    return float(found[1]) * UNITS[found[2]]


# ---- moving ----------------------------------------------------------------------------------------------------------


def export(location: Location, to: Path) -> None:
    """JSON lines if the target ends in .jsonl, else a folder of Parquet files."""
    if to.exists():
        raise ConfigError(f"'{to}' is there already; export to a new one.")
    run_sync(_export(location, to))


async def _export(location: Location, to: Path) -> None:
    async with location.opened() as store:
        found = (await store.statistics())["rollouts"]
        total = sum(found[status] for status in FINISHED_ROLLOUT)
        with Passing("exported", total) as count:
            records = count.awaited(store.export_records())
            if to.suffix == ".jsonl":
                await _write_lines(records, to)
            else:
                from agentlightning.store.transfer.parquet import write_folder

                await write_folder(records, to)
    console.print(f"Exported {counted(count.done, 'finished rollout')} to {to}")


async def _write_lines(records: AsyncIterator[Record], to: Path) -> None:
    """The file takes its name only when it is whole."""
    part = to.with_name(to.name + ".part")
    with open_private(part, "wb") as file:
        async for record in records:
            file.write(to_line(record) + b"\n")
    part.replace(to)


def import_(location: Location, source: Path) -> None:
    if not source.exists():
        raise ConfigError(f"There is no '{source}'. Give a .jsonl file or a folder of Parquet files.")
    run_sync(_import(location, source))


async def _import(location: Location, source: Path) -> None:
    records = _read(source)
    first = list(islice(records, 1))  # a source that cannot be read leaves no new store behind
    async with location.opened(create=True) as store:
        with Passing("read", None) as count:
            new = await store.import_records(count.counted(chain(first, records)))
    console.print(f"Imported {counted(new, 'rollout')} into {location}; {count.done - new:,} were there already.")


def _read(source: Path) -> Iterator[Record]:
    if source.is_dir():
        from agentlightning.store.transfer.parquet import read_folder

        yield from read_folder(source)
        return
    with source.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    yield from_line(line)
                except StoreError as error:
                    raise StoreError(
                        f"{source}, line {number}: {error} Mend that line or delete it, and import again: what is in "
                        "the store already is left alone."
                    ) from error


class Passing:
    """Counts what passes through, and shows it."""

    def __init__(self, verb: str, total: int | None):
        self.done = 0
        self._text = f"{{:,}}{'' if total is None else f' of {total:,}'} rollouts {verb}"
        self.Passing = Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True)
        self._task = self.Passing.add_task(self._text.format(0), total=total)

    def __enter__(self) -> Passing:
        self.Passing.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.Passing.stop()

    def _step(self) -> None:
        self.done += 1
        if self.done % 100 == 0:
            self.Passing.update(self._task, description=self._text.format(self.done), completed=self.done)

    def counted(self, records: Iterator[Record]) -> Iterator[Record]:
        for record in records:
            self._step()
            yield record

    async def awaited(self, records: AsyncIterator[Record]) -> AsyncIterator[Record]:
        async for record in records:
            self._step()
            yield record
