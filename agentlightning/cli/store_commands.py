"""The commands of `agl store`; their work is in `store`, imported when one runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.key_options import key_option
from agentlightning.cli.options import AllowHost, Json

if TYPE_CHECKING:
    from agentlightning.cli.store import Location

store_app = typer.Typer(name="store", no_args_is_help=False, rich_markup_mode="rich")

StorePath = Annotated[Path | None, typer.Option("--path", help="The SQLite file; store.db if not given.")]
StoreDsn = Annotated[
    str | None,
    typer.Option("--dsn", envvar="AGL_STORE_DSN", help="PostgreSQL instead: postgresql://user:password@host/db"),
]
"""The store may be named before a command or after it."""
CorsOrigin = Annotated[list[str] | None, typer.Option("--cors-origin", hidden=True)]
Tracker = Annotated[list[str] | None, typer.Option("--tracker", hidden=True)]
Workers = Annotated[int, typer.Option("--n-workers", hidden=True)]
MongoUri = Annotated[str | None, typer.Option("--mongo-uri", hidden=True)]
"""What scripts for 0.3 say; see `refuse_older`."""


@store_app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    path: StorePath = None,
    dsn: StoreDsn = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 4747,
    key: Annotated[
        str | None, key_option("AGL_STORE_KEY", "Admin key that clients must send; one is made on loopback.")
    ] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the secret of attempt keys; made if it is not there. Needs --key.")
    ] = None,
    no_key: Annotated[bool, typer.Option("--no-key", help="Let everybody on this machine read and write it.")] = False,
    allow_host: AllowHost = [],  # noqa: B006 - typer copies it
    backend: Annotated[
        str | None, typer.Option(help="sqlite, postgres (needs --dsn), or memory: a temporary file, gone at the end.")
    ] = None,
    log_level: Annotated[
        str, typer.Option(help="Of the server's log: DEBUG, INFO, WARNING (the default), ERROR.")
    ] = "WARNING",
    cors_origin: CorsOrigin = None,
    tracker: Tracker = None,
    n_workers: Workers = 1,
    mongo_uri: MongoUri = None,
) -> None:
    """Serve a store to runners, trainers and other machines; or, with a command, look after one.

    A run's store is the file store.db in its folder. One process owns a SQLite file: stop the run first, or read it
    through its server.

    agl store --path team.db --host 0.0.0.0 --key @key.txt       serve one to other machines

    agl store statistics runs/grpo-20250101-120000               count what is in a run's

    agl store --path team.db prune --older-than 30d
    """
    from agentlightning.cli.store import Location, log_at, refuse_older, serve

    refuse_older(cors_origin, tracker, n_workers)
    context.obj = Location(path, dsn, "mongo" if mongo_uri else backend)
    log_at(log_level)
    if context.invoked_subcommand is None:
        serve(context.obj, host, port, key, secret_file, allow_host, no_key)


@store_app.command("statistics")
@store_app.command("stats", hidden=True)
def statistics(
    context: typer.Context,
    run: Annotated[Path | None, typer.Argument(help="A run's folder, or the file of a store.")] = None,
    path: StorePath = None,
    dsn: StoreDsn = None,
    as_json: Json = False,
) -> None:
    """Count what is stored, by status; also of a run that is going on.

    agl store statistics runs/grpo-20250101-120000
    """
    from agentlightning.cli import store

    store.stats(_named(context, path, dsn) if run is None else store.location_of(run), as_json=as_json)


@store_app.command()
def export(
    context: typer.Context,
    to: Annotated[Path, typer.Argument(help="A new file ending in .jsonl, or a new folder for Parquet files.")],
    path: StorePath = None,
    dsn: StoreDsn = None,
) -> None:
    """Write the finished rollouts with their attempts, spans and calls to JSON lines or Parquet.

    agl store export rollouts.jsonl --path runs/grpo-20250101-120000/store.db
    """
    from agentlightning.cli import store

    store.export(_named(context, path, dsn), to)


@store_app.command("import")
def import_(
    context: typer.Context,
    source: Annotated[Path, typer.Argument(help="What `agl store export` wrote.")],
    path: StorePath = None,
    dsn: StoreDsn = None,
) -> None:
    """Add exported rollouts to a store; skips those that already exist.

    agl store import rollouts.jsonl --path team.db
    """
    from agentlightning.cli import store

    store.import_(_named(context, path, dsn), source)


@store_app.command()
def prune(
    context: typer.Context,
    older_than: Annotated[str | None, typer.Option(help="Forget what finished so long ago: 12h, 30d, 2w.")] = None,
    keep: Annotated[int | None, typer.Option(min=0, help="Forget all but so many of the last finished ones.")] = None,
    path: StorePath = None,
    dsn: StoreDsn = None,
) -> None:
    """Delete finished rollouts, by age or count. Unfinished ones, resources and workers stay.

    agl store prune --path team.db --older-than 30d
    """
    from agentlightning.cli import store

    store.prune(_named(context, path, dsn), older_than, keep)


@store_app.command()
def key(
    rollout_id: Annotated[str, typer.Argument(help="The rollout that the key opens.")],
    attempt_id: Annotated[str, typer.Argument(help="Its attempt.")],
    secret_file: Annotated[Path, typer.Option(help="The file that the server was started with.")],
    scope: Annotated[
        list[str] | None, typer.Option(help="What it may do: calls, spans, task, rewards; all if not given.")
    ] = None,
) -> None:
    """Print a key that opens one attempt and nothing else, for an agent that is not trusted.

    agl store key ROLLOUT ATTEMPT --secret-file secret
    """
    from agentlightning.cli.store import attempt_key

    typer.echo(attempt_key(rollout_id, attempt_id, scope or [], secret_file))


@store_app.command("console", hidden=True)
@store_app.command("prometheus", hidden=True)
def more_trackers() -> None:
    """`--tracker prometheus console`: what follows the first one."""
    from agentlightning.cli.store import refuse_older

    refuse_older(None, ["console"], 1)


def _named(context: typer.Context, path: Path | None, dsn: str | None) -> Location:
    """The store that was named after the command, else the one before it."""
    before: Location = context.obj
    if path is None and dsn is None:
        return before
    return replace(before, path=path or before.path, dsn=dsn or before.dsn)
