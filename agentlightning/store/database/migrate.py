"""Bringing a database to the current schema when it is opened.

A new database gets the tables at once and is stamped with `schema.HEAD`; an older one runs the Alembic migrations in
`migrations`, which needs the extra of that name. A newer one is refused.
"""

from __future__ import annotations

import functools
import logging
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, LiteralString, cast

from sqlalchemy.schema import CreateIndex, CreateTable

from agentlightning.errors import StoreError, missing_extra
from agentlightning.store.database.schema import HEAD, metadata
from agentlightning.store.database.transaction import DIALECTS

if TYPE_CHECKING:
    from alembic.config import Config
    from psycopg import Connection

logger = logging.getLogger(__name__)

MIGRATIONS = Path(__file__).parent / "migrations"


@functools.cache
def create_statements(dialect: str) -> tuple[str, ...]:
    """The DDL of the current schema, with Alembic's stamp."""
    elements = [CreateTable(table) for table in metadata.sorted_tables]
    elements += [CreateIndex(index) for table in metadata.sorted_tables for index in sorted(table.indexes, key=str)]
    statements = [str(element.compile(dialect=DIALECTS[dialect])) for element in elements]
    statements.append("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL PRIMARY KEY)")
    statements.append(f"INSERT INTO alembic_version (version_num) VALUES ('{HEAD}')")
    return tuple(statements)


def prepare_sqlite(path: Path) -> None:
    """Create or migrate the file at `path`."""
    connection = sqlite3.connect(path, isolation_level=None)
    try:
        connection.execute("PRAGMA trusted_schema=OFF")
        connection.execute("PRAGMA journal_mode=WAL")
        revision = _sqlite_revision(connection, path)
        if revision is None:
            connection.execute("BEGIN IMMEDIATE")
            for statement in create_statements("sqlite"):
                connection.execute(statement)
            connection.execute("COMMIT")
    finally:
        connection.close()
    if revision not in (None, HEAD):
        upgrade(f"sqlite:///{path}", revision)


def _sqlite_revision(connection: sqlite3.Connection, path: Path) -> str | None:
    """The stamp; None for an empty file. Raises StoreError for another database, and for one with programs of its own:
    a view, a trigger, or a computed column may compute forever, and change what it is asked about."""
    found = connection.execute(
        "SELECT type, name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%' ORDER BY type DESC"
    ).fetchall()
    odd = [row for row in found if row[0] in ("view", "trigger") or not _words(row[2]) <= _known_words()]
    tables = {name for kind, name, _ in found if kind == "table"}
    revision = None
    if "alembic_version" in tables - {name for _, name, _ in odd}:
        (revision,) = connection.execute("SELECT version_num FROM alembic_version").fetchone()
    newer = revision is not None and revision not in _revisions()
    for kind, name, _ in odd:
        if kind in ("view", "trigger") or ("alembic_version" in tables and not newer):
            raise StoreError(f"'{path}' has the {kind} '{name}', which no store has. Take it out, or use another.")
    if tables and "alembic_version" not in tables:
        raise StoreError(f"'{path}' is a SQLite database, but not one of a store. Choose another path.")
    return revision


@functools.cache
def _known_words() -> set[str]:
    """Those of our own tables, which have no functions and no operators, and of Alembic's."""
    return _words("\n".join(create_statements("sqlite"))) | {"constraint", "alembic_version_pkc"}


def _words(sql: str) -> set[str]:
    """The words and the signs of a description of tables."""
    return set(re.findall(r"\w+|[^\w\s,()\"`\[\]]", sql.lower()))


def prepare_postgres(connection: Connection[Any], dsn: str) -> None:
    """Create or migrate the tables; several servers may start at the same moment."""
    import psycopg

    connection.execute("SELECT pg_advisory_lock(hashtext('agentlightning'))")
    try:
        found = connection.execute("SELECT to_regclass('alembic_version')").fetchone()
        if found is None or found[0] is None:
            with connection.transaction():
                for statement in create_statements("postgresql"):
                    connection.execute(cast(LiteralString, statement))
            return
        row = connection.execute("SELECT version_num FROM alembic_version").fetchone()
        if row is not None and row[0] != HEAD:
            upgrade("postgresql+psycopg://", row[0], connect=lambda: psycopg.connect(dsn))
    finally:
        connection.execute("SELECT pg_advisory_unlock(hashtext('agentlightning'))")


def alembic_config(url: str) -> Config:
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.set_main_option("sqlalchemy.url", url.replace("%", "%%"))
    return config


def _revisions() -> set[str]:
    return {file.stem.partition("_")[0] for file in (MIGRATIONS / "versions").glob("*.py")}


def upgrade(url: str, revision: str | None, connect: Callable[[], Any] | None = None) -> None:
    """Run the migrations from `revision` to the current schema. `connect` makes a connection, if the URL does not."""
    if revision is not None and revision not in _revisions():
        raise StoreError(
            f"The store was written by a newer version of agentlightning (schema {revision}, this one knows {HEAD}). "
            "Open it with that version."
        )
    try:
        from alembic import command
    except ImportError:
        raise missing_extra("migrations", "alembic") from None
    config = alembic_config(url)
    config.attributes["connect"] = connect
    logger.info("Migrating the store from schema %s to %s.", revision, HEAD)
    command.upgrade(config, "head")
