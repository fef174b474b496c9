"""Alembic's entry point; see `agentlightning.store.database.migrate`."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, pool

from agentlightning.store.database.schema import metadata


def run() -> None:
    url = context.config.get_main_option("sqlalchemy.url")
    assert url is not None
    # PostgreSQL is given as a function that connects, so that its own kind of address goes to its driver as it is.
    connect = context.config.attributes.get("connect")
    arguments = {} if connect is None else {"creator": connect}
    engine = create_engine(url, poolclass=pool.NullPool, **arguments)
    with engine.connect() as connection:
        # SQLite changes columns by copying the table.
        batch = connection.dialect.name == "sqlite"
        context.configure(connection=connection, target_metadata=metadata, render_as_batch=batch)
        with context.begin_transaction():
            context.run_migrations()


run()
