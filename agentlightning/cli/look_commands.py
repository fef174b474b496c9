"""The commands that look at runs: `agl why` and those beside it. The work is in modules of their own."""

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
    Json,
    RewardOption,
    TaskAsOption,
    Tasks,
    program_options,
)
from agentlightning.cli.key_options import key_option

Run = Annotated[Path, typer.Argument(help="A run's folder, or the file of a store; the run may be going on.")]
RunId = Annotated[str | None, typer.Option("--run-id", help="Which run of a store that holds several; else the last.")]


class Outcome(StrEnum):
    """As in `types`, which is not loaded for a page of help."""

    OK = "ok"
    TRUNCATED = "truncated"
    AGENT_ERROR = "agent_error"
    INFRA_ERROR = "infra_error"
    JUDGE_ERROR = "judge_error"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"


def show(
    run: Run,
    rollout: Annotated[str | None, typer.Argument(help="The rollout to show; the last ones if not given.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only rollouts that failed.")] = False,
    step: Annotated[int | None, typer.Option(help="Only those of this step.")] = None,
    task: Annotated[str | None, typer.Option(help="Only those with this text in their task or id.")] = None,
    outcome: Annotated[
        Outcome | None, typer.Option(metavar="<name>", help=f"Only those that ended so: {', '.join(Outcome)}.")
    ] = None,
    reward_min: Annotated[float | None, typer.Option(help="Only those that earned at least so much.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Only those that earned at most so much.")] = None,
    group: Annotated[
        str | None,
        typer.Option(
            help=(
                "All siblings of this group (step and number, such as 12-0), the best first, side by side with "
                "their advantages."
            )
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show so many.")] = 3,
    full: Annotated[bool, typer.Option("--full", help="System prompts and tools too.")] = False,
    log: Annotated[bool, typer.Option("--log", help="Only the messages that the agents emitted.")] = False,
    as_json: Json = False,
) -> None:
    """Show what was said in the rollouts of a run: task, messages, tool calls, reward, error.

    agl show runs/grpo-20250101-120000 --failed

    agl show runs/grpo-20250101-120000 --step 12 --reward-max 0

    agl show runs/grpo-20250101-120000 --group 12-0
    """
    from agentlightning import types
    from agentlightning.cli.show import ShowOptions, show_rollouts

    wanted = ShowOptions(
        rollout_id=rollout,
        failed=failed,
        limit=limit,
        full=full,
        log=log,
        step=step,
        task=task,
        group=group,
        outcome=None if outcome is None else types.Outcome(outcome.value),
        reward_min=reward_min,
        reward_max=reward_max,
        as_json=as_json,
    )
    show_rollouts(run, wanted)


def whatif(
    run: Run,
    step: Annotated[int | None, typer.Option(help="The step to look at; the last one if not given.")] = None,
    loss: Annotated[list[str] | None, typer.Option(help="Another loss; may be given many times.")] = None,
    advantage: Annotated[list[str] | None, typer.Option(help="Another advantage; may be given many times.")] = None,
    credit: Annotated[list[str] | None, typer.Option(help="Another way of credit; may be given many times.")] = None,
    correction: Annotated[
        list[str] | None, typer.Option(help="Other importance weights; may be given many times.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Other settings, NAME=VALUE NAME=VALUE: one variant with all of them; may be given many times.",
        ),
    ] = None,
    policy: Annotated[str | None, typer.Option(help="Whose gradient; the first of several if not given.")] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Compute with these weights; else the last kept ones of before the step.")
    ] = None,
    run_id: RunId = None,
    trust: Annotated[
        bool, typer.Option("--trust", help="Import the code that the run names, such as its loss.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What if a step had been learned otherwise? Its gradient under other settings, beside the one taken.

    Nothing is sampled, and nothing of the run is changed. Without options a telling set is compared.

    agl whatif runs/grpo-20250101-120000 --step 12

    agl whatif runs/grpo-20250101-120000 --step 12 --loss gspo --set "loss=cispo clip_high=2.0" --json
    """
    from agentlightning.cli.whatif import WhatIfOptions, ask_what_if, changes_of

    given = {"loss": loss, "advantage": advantage, "credit": credit, "correction": correction}
    changes = changes_of({name: values or [] for name, values in given.items()}, settings or [])
    options = WhatIfOptions(
        step=step, changes=changes, policy=policy, checkpoint=checkpoint, as_json=as_json, trust=trust
    )
    ask_what_if(run, run_id, options)


def judge(
    run: Run,
    labels: Annotated[
        str | None,
        typer.Option(
            help=(
                "What it is compared with: a file of lines with rollout_id and label; reward, for the run's own "
                "rewards; or reward/NAME, for a part of them. Without labels, its answers with each other only."
            )
        ),
    ] = None,
    write_labels: Annotated[
        Path | None, typer.Option(help="Write such a file for people to fill in, and ask no judge.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(
            help="The judge's OpenAI-compatible base URL; the run's own judge if not given. Key: AGL_JUDGE_KEY."
        ),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The judge's model there.")] = None,
    rubric: Annotated[Path | None, typer.Option(help="A file that says what is good.")] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of another setting of a GroupJudge; may be given many times."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Ask about so many groups, drawn at random.")] = 50,
    equal: Annotated[float, typer.Option(min=0.0, help="Scores that differ by no more count as equal.")] = 0.05,
    run_id: RunId = None,
    trust: Annotated[bool, typer.Option("--trust", help="Let the address that the run names have the key.")] = False,
    as_json: Json = False,
) -> None:
    """Measure a judge of groups on a run's rollouts: does it order siblings as labels do, and does order sway it?

    Each group costs two questions to the judge. Nothing of the run is changed.

    agl judge runs/grpo-20250101-120000 --write-labels labels.jsonl

    agl judge runs/grpo-20250101-120000 --labels labels.jsonl --url https://api.openai.com/v1 --model gpt-4.1-mini
    """
    from agentlightning.cli.judge import JudgeOptions, measure_judge

    options = JudgeOptions(
        labels=labels,
        template=write_labels,
        url=url,
        model=model,
        rubric=rubric,
        settings=settings or [],
        limit=limit,
        equal=equal,
        trust=trust,
        as_json=as_json,
    )
    measure_judge(run, run_id, options)


def runs(
    folder: Annotated[Path, typer.Argument(help="A folder with runs in it.")] = Path("runs"), as_json: Json = False
) -> None:
    """List runs: algorithm, agent, steps, how the reward went, and which go on now.

    agl runs

    agl runs my-folder --json
    """
    from agentlightning.cli.runs import list_runs

    list_runs(folder, as_json=as_json)


def compare(
    first: Annotated[Path, typer.Argument(help="A run's folder.")],
    second: Annotated[Path, typer.Argument(help="Another run's folder.")],
    metric: Annotated[str, typer.Option(help="The metric whose curves are laid over each other.")] = "reward",
    as_json: Json = False,
) -> None:
    """Compare two runs: their curves in one picture, what they came to, and the settings in which they differ.

    agl compare runs/a runs/b

    agl compare runs/a runs/b --metric entropy
    """
    from agentlightning.cli.runs import compare_runs

    compare_runs(first, second, metric, as_json=as_json)


def watch(
    run: Run,
    run_id: RunId = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Look again after so many.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Show it as it is now, and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print how it stands now as JSON, for programs, and end.")
    ] = False,
) -> None:
    """Watch a run that goes on: its curve, the step it is in, what is left, and the rollouts under way.

    agl watch runs/grpo-20250101-120000
    """
    from agentlightning.cli.watch import watch_run

    watch_run(run, run_id, seconds, once=once, as_json=as_json)


def report(
    run: Run,
    to: Annotated[Path | None, typer.Option(help="The file to write; report.html in the run's folder else.")] = None,
    run_id: RunId = None,
) -> None:
    """Write one HTML file about a run to send to somebody: curves, verdicts, settings, ten telling rollouts.

    agl report runs/grpo-20250101-120000 --to report.html
    """
    from agentlightning.cli.report import write_report
    from agentlightning.console import safe

    typer.echo(safe(str(write_report(run, to, run_id))))


def doctor(
    agent: Agent,
    tasks: Tasks,
    model: Annotated[
        str | None, typer.Option(help="The model to ask: a shipped one's name, a directory; calc if not given.")
    ] = None,
    endpoint: Annotated[
        str | None, typer.Option(help="Let it ask the provider at this OpenAI-compatible base URL instead.")
    ] = None,
    endpoint_model: Annotated[str, typer.Option(help="The model to ask for there.")] = "default",
    api_key: Annotated[str | None, key_option("OPENAI_API_KEY", "The key for it.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Look at so many tasks.")] = 4,
    repeats: Annotated[
        int,
        typer.Option(min=1, help="Rollouts of each, which are compared; eight at least where there is a single task."),
    ] = 4,
    seconds: Annotated[float, typer.Option(min=1.0, help="Stop after so many, and say what was seen by then.")] = 45.0,
    group_size: Annotated[int, typer.Option(min=1, help="Of the training that is meant.")] = 8,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Of the training that is meant.")] = 16,
    max_context: Annotated[int, typer.Option(min=1, help="Of the training that is meant.")] = 4096,
    task_as: TaskAsOption = None,
    reward: RewardOption = None,
    grader: Grader = None,
    files: Files = None,
    isolation: IsolationOption = None,
    isolation_option: IsolationSetting = None,
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
    program = program_options(task_as, reward, grader, files, None, isolation, isolation_option)
    if examine_agent(find_agent(agent, program), load_tasks(tasks), options):
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


def models(
    gpus: Annotated[
        str | None, typer.Option(help="What there is: 4xH100, L4, or cpu; what this machine has if not given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List models to train: which ship, which are in the local cache, and what each takes on this machine.

    agl models

    agl models --gpus 2xL4
    """
    from agentlightning.cli.models import list_models

    list_models(gpus, as_json=as_json)


def plan(
    model: Annotated[
        str,
        typer.Option(
            help=(
                "A shipped model's name, a directory, a Hugging Face id, or a size: 135M, 0.6B, 1.7B, 4B, 8B, "
                "14B, 30B-A3B, 32B, 70B."
            )
        ),
    ],
    gpus: Annotated[
        str | None, typer.Option(help="What there is: 4xH100, L4, or cpu; what this machine has if not given.")
    ] = None,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Train an adapter of this rank.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Of the weights; bfloat16 on GPUs and float32 on processors if not given.")
    ] = None,
    context: Annotated[
        int | None, typer.Option(min=16, help="Tokens of the longest rollout; 4096 if the model can do as much.")
    ] = None,
    response: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of it that are sampled, all calls together; a quarter if not given."),
    ] = None,
    group_size: Annotated[int, typer.Option(min=1, help="Rollouts per task.")] = 8,
    tasks_per_step: Annotated[int, typer.Option(min=1, help="Tasks of a step.")] = 16,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests that are sampled at the same time.")] = 64,
    tokens_per_batch: Annotated[int, typer.Option(min=1, help="Tokens in one pass of the learner.")] = 16_384,
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Compute activations twice instead of keeping them.")
    ] = False,
    offload: Annotated[bool, typer.Option("--offload", help="Keep the optimiser in the host's memory.")] = False,
    as_json: Json = False,
) -> None:
    """Say on paper whether a training fits, how long a step takes, and which backend to take. Exits with 1 if not.

    agl plan --model Qwen/Qwen3-8B --gpus 2xH100 --lora-rank 16

    agl plan --model 4B --gpus L4 --context 8192
    """
    from agentlightning.cli.plan import Options, plan_training

    settings = {
        "lora_rank": lora_rank,
        "group_size": group_size,
        "tasks_per_step": tasks_per_step,
        "concurrency": concurrency,
        "tokens_per_batch": tokens_per_batch,
        "gradient_checkpointing": gradient_checkpointing,
        "offload": offload,
    }
    options = Options(
        model=model, gpus=gpus, dtype=dtype, context=context, response=response, settings=settings, as_json=as_json
    )
    if not plan_training(options):
        raise typer.Exit(1)
