"""The commands that look at runs: `agl why` and those beside it. The work is in modules of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.agent_commands import Agent, Concurrency, Tasks

Run = Annotated[Path, typer.Argument(help="A run's folder, or the file of a store; the run may be going on.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="Which run of a store that holds several; else the last.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def doctor(
    agent: Agent,
    tasks: Tasks,
    model: Annotated[
        str | None, typer.Option(help="The model to ask: a shipped one's name, a directory; calc if not given.")
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="Let it ask this OpenAI-compatible base URL instead.")] = None,
    endpoint_model: Annotated[str, typer.Option(help="The model to ask for there.")] = "default",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="The key for it.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Look at so many tasks.")] = 4,
    repeats: Annotated[int, typer.Option(min=1, help="Rollouts of each, which are compared.")] = 4,
    seconds: Annotated[float, typer.Option(min=1.0, help="Stop after so many, and say what was seen by then.")] = 50.0,
    group_size: Annotated[int, typer.Option(min=1, help="Of the training that is meant.")] = 8,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Of the training that is meant.")] = 16,
    max_context: Annotated[int, typer.Option(min=1, help="Of the training that is meant.")] = 4096,
    concurrency: Concurrency = 16,
    as_json: Json = False,
) -> None:
    """Run a few rollouts of an agent and say what stands in the way of training it. Exits with 1 for a problem.

    agl doctor --agent my_agent.py:agent --tasks tasks.jsonl

    agl doctor --agent "node agent.js" --tasks tasks.jsonl --model ./my-model
    """
    from agentlightning.cli.agents import find_agent
    from agentlightning.cli.doctor import Options, examine_agent
    from agentlightning.trainer.tasks import load_tasks

    options = Options(
        model=model,
        endpoint=endpoint,
        endpoint_model=endpoint_model,
        api_key=api_key,
        tasks=limit,
        repeats=repeats,
        seconds=seconds,
        group_size=group_size,
        tasks_per_step=tasks_per_step,
        concurrency=concurrency,
        max_context=max_context,
        as_json=as_json,
    )
    if examine_agent(find_agent(agent), load_tasks(tasks), options):
        raise typer.Exit(1)


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
