"""`agl optimize`: the options. The work is in `cli.optimize`."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli.agent_commands import (
    Agent,
    Concurrency,
    Files,
    Grader,
    IsolationOption,
    IsolationSetting,
    RewardOption,
    RunDir,
    TaskAsOption,
    Tasks,
    Timeout,
    Workspaces,
    program_options,
)
from agentlightning.cli.key_options import key_option

EPILOG = """\
[bold]Examples[/bold]

An agent with a parameter prompt_template, its prompt in a file:

  agl optimize --agent agent.py:agent --tasks train.jsonl --val-tasks val.jsonl --prompt prompt.txt
  --endpoint https://api.openai.com/v1 --endpoint-model gpt-5-mini --critic-model gpt-5

A program that cannot be edited: the gateway puts the text after its own system prompt:

  agl optimize --agent "node agent.js" --tasks train.jsonl --grader "python grade.py" --system-prompt extra.txt
  --prompt-place after --endpoint http://127.0.0.1:8000/v1 --endpoint-model policy --critic-model policy

Go on with a run that was stopped or killed: the same command and --resume RUN.
"""


class Tuner(StrEnum):
    APO = "apo"
    GEPA = "gepa"


class PromptPlace(StrEnum):
    REPLACE = "replace"
    BEFORE = "before"
    AFTER = "after"


def optimize(
    agent: Agent,
    tasks: Tasks,
    val_tasks: Annotated[
        Path | None, typer.Option(help="Tasks to validate on; half of the tasks if not given.")
    ] = None,
    algorithm: Annotated[
        Tuner, typer.Option(help="apo (beam search) or gepa (a Pareto front; needs the extra gepa); apo if not given.")
    ] = Tuner.APO,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "A file with a prompt to tune, or NAME=FILE; prompt_template unless a name is given; may be "
                "given many times."
            )
        ),
    ] = None,
    system_prompt: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "The same for the system prompt of a program, which the gateway puts in; AGENT=FILE for one of "
                "several agents."
            )
        ),
    ] = None,
    prompt_place: Annotated[
        PromptPlace,
        typer.Option(help="Whether --system-prompt goes in place of the program's own, before or after it."),
    ] = PromptPlace.REPLACE,
    tool_description: Annotated[
        list[str] | None,
        typer.Option(help="TOOL=FILE with the description of a program's tool; may be given many times."),
    ] = None,
    demonstrations: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=(
                "Show up to so many answered examples before the agent's question, chosen from its good runs; "
                "needs no critic."
            ),
        ),
    ] = None,
    answer: Annotated[
        str | None, typer.Option(help="With --demonstrations: the field of a task with the right answer to show.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="A local model to serve to the agent: a checkpoint, a directory, a Hugging Face id."),
    ] = None,
    endpoint: Annotated[str | None, typer.Option(help="OpenAI-compatible base URL of the agent's model.")] = None,
    endpoint_model: Annotated[
        str | None, typer.Option(help="The model to ask for there; the only one that it serves if not given.")
    ] = None,
    api_key: Annotated[str | None, key_option("OPENAI_API_KEY", "The key for it.")] = None,
    critic_url: Annotated[
        str | None, typer.Option(help="OpenAI-compatible base URL of the critic; --endpoint if not given.")
    ] = None,
    critic_model: Annotated[
        str | None,
        typer.Option(help="The critic's model; --endpoint-model if the critic is at --endpoint."),
    ] = None,
    critic_key: Annotated[str | None, key_option("AGL_CRITIC_KEY", "The key for it; --api-key if not given.")] = None,
    budget_rollouts: Annotated[int | None, typer.Option(min=1, help="At most so many rollouts.")] = None,
    budget_critic_tokens: Annotated[
        int, typer.Option(min=1, help="At most so many tokens to and from the critic.")
    ] = 500_000,
    budget_cost: Annotated[float | None, typer.Option(min=0.0, help="At most so much; needs --prices.")] = None,
    prices: Annotated[
        str | None,
        typer.Option(help="Per million tokens: critic in, critic out, agent in, agent out; such as 1.2,9,0.3,2."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a setting of the algorithm, such as beam_rounds=5. May repeat."),
    ] = None,
    task_as: TaskAsOption = None,
    reward: RewardOption = None,
    grader: Grader = None,
    files: Files = None,
    workspaces: Workspaces = None,
    isolation: IsolationOption = None,
    isolation_option: IsolationSetting = None,
    timeout: Timeout = None,
    concurrency: Concurrency = 16,
    run_dir: RunDir = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the run in this folder.")] = None,
) -> None:
    """Tune the prompts of any agent by APO or GEPA, within a budget; its model stays as it is."""
    from agentlightning.cli.agents import find_agent
    from agentlightning.cli.optimize import optimize_agent, read_prompts
    from agentlightning.trainer.tasks import load_tasks

    optimize_agent(
        find_agent(agent, program_options(task_as, reward, grader, files, workspaces, isolation, isolation_option)),
        load_tasks(tasks),
        load_tasks(val_tasks) if val_tasks else None,
        algorithm=algorithm.value,
        prompts=read_prompts(
            prompt or [], system_prompt or [], tool_description or [], prompt_place.value, demonstrations, answer
        ),
        model=model,
        endpoint=endpoint,
        endpoint_model=endpoint_model,
        api_key=api_key,
        critic_url=critic_url,
        critic_model=critic_model,
        critic_key=critic_key,
        budget={"rollouts": budget_rollouts, "critic_tokens": budget_critic_tokens, "cost": budget_cost},
        prices=prices,
        settings=settings or [],
        timeout=timeout,
        concurrency=concurrency,
        run_dir=run_dir,
        resume=resume,
    )
