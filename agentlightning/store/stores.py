"""The stores that users open: one SQL store, on a SQLite file, on a temporary one, or on PostgreSQL."""

from __future__ import annotations

import functools
import shutil
import tempfile
import weakref
from pathlib import Path

from agentlightning.arguments import explained
from agentlightning.errors import ConfigError, missing_extra
from agentlightning.store.base import Capabilities
from agentlightning.store.database.notify import Notifier
from agentlightning.store.database.sqlite import BUSY_SECONDS, SqliteDatabase
from agentlightning.store.database.transaction import Changes
from agentlightning.store.operations.watchdog import TICK_SECONDS, Watchdog
from agentlightning.store.sql import SqlLightningStore

_call = functools.partial


def _sqlite(
    path: Path, synchronous: str, tick_seconds: float, busy_seconds: float, notifier: Notifier
) -> SqliteDatabase:
    def on_commit(changes: Changes) -> None:
        for run_id, count in changes.queued.items():
            notifier.queued(count, run_id)
        if changes.finished:
            notifier.finished(changes.finished)

    watchdog = Watchdog(every=tick_seconds)
    return SqliteDatabase(
        path,
        synchronous=synchronous,
        on_commit=on_commit,
        tick=watchdog,
        tick_seconds=tick_seconds,
        busy_seconds=busy_seconds,
    )


class SqliteLightningStore(SqlLightningStore):
    """The store in a SQLite file, owned by this process.

    An acknowledged write survives kill -9 of the process; with `power_safe=True` also the loss of power (slower: one
    fsync per group of commits). Other processes use it through `LightningStoreServer`. `busy_seconds` is how long a
    write waits for another program that has locked the file.
    """

    @explained
    def __init__(
        self,
        path: str | Path,
        *,
        power_safe: bool = False,
        watchdog_seconds: float = TICK_SECONDS,
        busy_seconds: float = BUSY_SECONDS,
    ):
        if str(path).startswith(("http:/", "https:/", "postgres:/", "postgresql:/")):
            other = "PostgresLightningStore" if str(path).startswith("postgres") else "LightningStoreClient"
            raise ConfigError(
                f"path is {str(path)!r}, and SQLite is a file. Such a store is agl.{other}({str(path)!r})."
            )
        self.path = Path(path).expanduser()
        capabilities = Capabilities(
            thread_safe=True, async_safe=True, multi_process=False, durable=True, otlp_traces=False
        )
        open_ = _call(_sqlite, self.path, "FULL" if power_safe else "NORMAL", watchdog_seconds, busy_seconds)
        super().__init__(open_, capabilities)


class PostgresLightningStore(SqlLightningStore):
    """The store in a PostgreSQL database, shared by many machines: each opens it, or serves it to others.

    `dsn` is PostgreSQL's own: `postgresql://user:password@host/database`. Operations wait for a server that goes away,
    and comes back within `outage_seconds`; then they fail.
    """

    @explained
    def __init__(self, dsn: str, *, watchdog_seconds: float = TICK_SECONDS, outage_seconds: float = 60.0):
        try:
            from agentlightning.store.database.postgres import PostgresDatabase
        except ImportError:
            raise missing_extra("postgres", "psycopg") from None
        capabilities = Capabilities(
            thread_safe=True, async_safe=True, multi_process=True, durable=True, otlp_traces=False
        )
        watchdog = Watchdog(every=watchdog_seconds)
        super().__init__(
            lambda notifier: PostgresDatabase(dsn, notifier, watchdog, watchdog_seconds, outage_seconds=outage_seconds),
            capabilities,
        )


class InMemoryLightningStore(SqlLightningStore):
    """The same store on a temporary file that is gone with it: for tests and trials."""

    @explained
    def __init__(self, *, watchdog_seconds: float = TICK_SECONDS):
        self.folder = Path(tempfile.mkdtemp(prefix="agl-store-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        capabilities = Capabilities(
            thread_safe=True, async_safe=True, multi_process=False, durable=False, otlp_traces=False
        )
        super().__init__(_call(_sqlite, self.folder / "store.db", "OFF", watchdog_seconds, BUSY_SECONDS), capabilities)

    async def close(self) -> None:
        await super().close()
        self._remove()
