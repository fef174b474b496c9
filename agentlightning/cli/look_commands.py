"""The commands that look at runs: `agl why` and those beside it. The work is in modules of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Run = Annotated[Path, typer.Argument(help="A run's folder, or the file of a store; the run may be going on.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="Which run of a store that holds several; else the last.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def why(
    run: Run,
    run_id: RunId = None,
    breaks: Annotated[bool, typer.Option("--breaks", help="Show where token histories broke, and why.")] = False,
    as_json: Json = False,
) -> None:
    """Say why a run is not learning, and what to try first. Exits with 1 when something makes training meaningless.

    agl why runs/grpo-20250101-120000            a finished run, or one that goes on

    agl why runs/grpo-20250101-120000 --json     for programs
    """
    from agentlightning.cli.why import explain_run

    if explain_run(run, run_id, as_json=as_json, breaks=breaks):
        raise typer.Exit(1)
