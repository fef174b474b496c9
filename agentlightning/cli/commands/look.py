"""Commands that look at runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from typer import Argument, Option

from agentlightning.cli.command import Command
from agentlightning.cli.key_options import key_option
from agentlightning.cli.options import AllowHost, EnvironmentOptions, Json, Run, RunDir, RunId, Trust

Outcomes = Literal["ok", "truncated", "agent_error", "infra_error", "judge_error", "timeout", "cancelled"]
"""As in `types`, which is not loaded for a page of help."""


@dataclass(frozen=True, kw_only=True)
class RunsOptions(Command):
    """List runs: algorithm, agent, steps, how the reward went, and which go on now.

    agl runs

    agl runs my-folder --json
    """

    command = "runs"
    work = "agentlightning.cli.runs:list_runs"

    folder: Annotated[Path, Argument(help="A folder with runs in it.")] = Path("runs")
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ShowOptions(Command):
    """Show what was said in the rollouts of a run: task, messages, tool calls, reward, error.

    agl show runs/grpo-20250101-120000 --failed

    agl show runs/grpo-20250101-120000 --step 12 --reward-max 0

    agl show runs/grpo-20250101-120000 --group 12-0
    """

    command = "show"
    work = "agentlightning.cli.show:show_rollouts"

    run: Run
    rollout: Annotated[str | None, Argument(help="The rollout to show; the last ones if not given.")] = None
    failed: Annotated[bool, Option("--failed", help="Only rollouts that failed.")] = False
    step: Annotated[int | None, Option(help="Only rollouts of this step.")] = None
    task: Annotated[str | None, Option(help="Only rollouts with this text in their task or id.")] = None
    outcome: Annotated[
        Outcomes | None,
        Option(metavar="<name>", help=f"Only rollouts with this outcome: {', '.join(get_args(Outcomes))}."),
    ] = None
    reward_min: Annotated[float | None, Option(help="Only rollouts that earned at least this much.")] = None
    reward_max: Annotated[float | None, Option(help="Only rollouts that earned at most this much.")] = None
    group: Annotated[
        str | None,
        Option(
            help=(
                "All siblings of this group (step and number, such as 12-0), the best first, side by side with "
                "their advantages."
            )
        ),
    ] = None
    limit: Annotated[int, Option(min=1, help="Number of rollouts to show.")] = 3
    full: Annotated[bool, Option("--full", help="System prompts and tools too.")] = False
    log: Annotated[bool, Option("--log", help="Only the messages that the agents emitted.")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ForkOptions(Command):
    """Run a rollout again from one of its calls on: those before are answered from the record, token for token.

    agl fork runs/grpo-20250101-120000 ro-123 --at 2 --times 8 --trust

    agl fork runs/grpo-20250101-120000 ro-123 --at 2 --agent my_agent.py:agent --model ./other-model

    agl fork runs/grpo-20250101-120000 ro-123 --at 2 --edit "tool=No such file." --trust
    """

    command = "fork"
    work = "agentlightning.cli.fork:fork_rollout"

    run: Run
    rollout: Annotated[str, Argument(help="The rollout to fork; agl show lists them.")]
    at: Annotated[
        int | None, Option(min=0, help="Number of calls to answer from the record; all but the last if not given.")
    ] = None
    edit: Annotated[
        list[str],
        Option(
            help=(
                "ROLE=TEXT or ROLE=@FILE: after the record, the model gets this as the system message, or as the last "
                "user, assistant or tool message; repeatable."
            )
        ),
    ] = field(default_factory=list)
    times: Annotated[int, Option(min=1, help="How many forks.")] = 4
    agent: Annotated[str | None, Option(help="The agent; with --trust the one of the run if not given.")] = None
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    model: Annotated[
        str | None, Option(help="The model that continues: a checkpoint, a directory; the run's last if not given.")
    ] = None
    refuse: Annotated[
        bool, Option("--refuse", help="Refuse calls that are not in the record, instead of sampling from there on.")
    ] = False
    tools_again: Annotated[
        bool,
        Option(
            "--tools-again",
            help=(
                "Run the agent's tools again, with their side effects: recorded results of @agl.replayed are not used, "
                "and a program whose attempts share a working folder is not refused."
            ),
        ),
    ] = False
    run_dir: RunDir = None
    trust: Trust = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class WatchOptions(Command):
    """Watch a run that goes on: its curve, the step it is in, what is left, and the rollouts under way.

    agl watch runs/grpo-20250101-120000
    """

    command = "watch"
    work = "agentlightning.cli.watch:watch_run"

    run: Run
    run_id: RunId = None
    seconds: Annotated[float, Option(min=0.1, help="Seconds between two refreshes.")] = 1.0
    once: Annotated[bool, Option("--once", help="Show the current state, then exit.")] = False
    as_json: Annotated[bool, Option("--json", help="Print the current state as JSON, for programs, then exit.")] = False


@dataclass(frozen=True, kw_only=True)
class WhyOptions(Command):
    """Say why a run is not learning, and what to try first. Exits with 1 when something makes training meaningless.

    agl why runs/grpo-20250101-120000            a finished run, or one that goes on

    agl why runs/grpo-20250101-120000 --json     for programs
    """

    command = "why"
    work = "agentlightning.cli.why:explain_run"

    run: Run
    run_id: RunId = None
    breaks: Annotated[bool, Option("--breaks", help="Show where and why token histories broke.")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Command):
    """Compare two runs: their curves in one picture, what they came to, and the settings in which they differ.

    agl compare runs/a runs/b

    agl compare runs/a runs/b --metric entropy
    """

    command = "compare"
    work = "agentlightning.cli.runs:compare_runs"

    first: Annotated[Path, Argument(help="A run's folder.")]
    second: Annotated[Path, Argument(help="Another run's folder.")]
    metric: Annotated[str, Option(help="The metric to plot.")] = "reward"
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class WhatIfOptions(Command):
    """What if a step had been learned otherwise? Its gradient under other settings, beside the one taken.

    Nothing is sampled, and nothing of the run is changed. Without options a telling set is compared.

    agl whatif runs/grpo-20250101-120000 --step 12

    agl whatif runs/grpo-20250101-120000 --step 12 --loss gspo --set "loss=cispo clip_high=2.0" --json
    """

    command = "whatif"
    work = "agentlightning.cli.whatif:ask_what_if"
    repeats_names = True

    run: Run
    step: Annotated[int | None, Option(help="The step to look at; the last one if not given.")] = None
    loss: Annotated[list[str], Option(help="Another loss; repeatable.")] = field(default_factory=list)
    advantage: Annotated[list[str], Option(help="Another advantage; repeatable.")] = field(default_factory=list)
    credit: Annotated[list[str], Option(help="Another credit mode; repeatable.")] = field(default_factory=list)
    correction: Annotated[list[str], Option(help="Other importance weights; repeatable.")] = field(default_factory=list)
    settings: Annotated[
        list[str],
        Option(
            "--set",
            help="Other settings, NAME=VALUE NAME=VALUE: one variant with all of them; repeatable.",
        ),
    ] = field(default_factory=list)
    policy: Annotated[str | None, Option(help="The policy whose gradient to compute; the first if not given.")] = None
    checkpoint: Annotated[
        Path | None, Option(help="Compute with these weights; the last checkpoint kept before the step if not given.")
    ] = None
    run_id: RunId = None
    trust: Annotated[bool, Option("--trust", help="Import the code that the run names, such as its loss.")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class JudgeOptions(Command):
    """Measure a judge of groups on a run's rollouts: does it order siblings as labels do, and does order sway it?

    Each group costs two questions to the judge. Nothing of the run is changed.

    agl judge runs/grpo-20250101-120000 --write-labels labels.jsonl

    agl judge runs/grpo-20250101-120000 --labels labels.jsonl --url https://api.openai.com/v1 --model gpt-4.1-mini
    """

    command = "judge"
    work = "agentlightning.cli.judge:measure_judge"

    run: Run
    labels: Annotated[
        str | None,
        Option(
            help=(
                "What to compare the judge with: a file of lines with rollout_id and label; reward, for the run's own "
                "rewards; or reward/NAME, for a part of them. Without labels, only its own answers are compared."
            )
        ),
    ] = None
    write_labels: Annotated[
        Path | None, Option(help="Write a file of labels for people to fill in, and call no judge.")
    ] = None
    url: Annotated[
        str | None,
        Option(help="The judge's OpenAI-compatible base URL; the run's own judge if not given. Key: AGL_JUDGE_KEY."),
    ] = None
    model: Annotated[str | None, Option(help="The judge's model there.")] = None
    rubric: Annotated[Path | None, Option(help="A file that says what is good.")] = None
    settings: Annotated[
        list[str],
        Option("--set", help="NAME=VALUE of another setting of a GroupJudge; repeatable."),
    ] = field(default_factory=list)
    limit: Annotated[int, Option(min=1, help="Number of groups to judge, drawn at random.")] = 50
    equal: Annotated[
        float, Option(min=0.0, max=0.9, help="Scores (0 to 1) that differ by at most this count as equal.")
    ] = 0.05
    run_id: RunId = None
    trust: Annotated[bool, Option("--trust", help="Let the address that the run names have the key.")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class ReportOptions(Command):
    """Write one HTML file about a run to send to somebody: curves, verdicts, settings, ten telling rollouts.

    agl report runs/grpo-20250101-120000 --to report.html
    """

    command = "report"
    work = "agentlightning.cli.report:write_report"

    run: Run
    to: Annotated[Path | None, Option(help="The file to write; report.html in the run's folder if not given.")] = None
    run_id: RunId = None


@dataclass(frozen=True, kw_only=True)
class DashboardOptions(Command):
    """Show runs, rollouts, tokens and groups in a browser; also of a run that is going on.

    agl dashboard                                 all runs in runs/

    agl dashboard runs/grpo-20250101-120000
    """

    command = "dashboard"
    work = "agentlightning.cli.dashboard:show_dashboard"

    where: Annotated[
        str | None,
        Argument(
            help="A run's folder, a folder of runs (its latest), a store's file, http://… or postgresql://…; the "
            "latest of runs/ if not given."
        ),
    ] = None
    host: Annotated[str, Option(help="Address to listen on; other than loopback needs --key.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0
    key: Annotated[str | None, key_option("AGL_STORE_KEY", "The key to log in with.")] = None
    allow_host: AllowHost = field(default_factory=list)
    browser: Annotated[bool, Option("--open/--no-open", help="Open it in a browser.")] = True
