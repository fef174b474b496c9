"""Commands that make an agent better."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from typer import Argument, Option

from agentlightning.cli.command import Command
from agentlightning.cli.key_options import key_option
from agentlightning.cli.options import (
    AGENT_HELP,
    Agent,
    BackendOptions,
    Concurrency,
    EnvironmentOptions,
    Json,
    ProgramOptions,
    RunDir,
    Tasks,
    Timeout,
    Trust,
    UpstreamOptions,
)
from agentlightning.metrics.trackers import TRACKERS


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Command):
    """Train the model behind any agent by GRPO or another algorithm, on this machine.

    agl train --agent my_agent.py:agent --tasks tasks.jsonl --model ./my-model --set steps=50

    agl train --data chats.jsonl --model ./my-model                  fine-tune on good conversations first

    agl train --algorithm DAPO --set steps=50 --print-config         what it would train with

    agl train --config runs/grpo-20250101-120000/run.json --trust    the same run again
    """

    command = "train"
    work = "agentlightning.cli.train:train_agent"
    goes_with: ClassVar = {"key_file": ("server",)}

    tasks: Annotated[
        Path | None,
        Option(help="Tasks: a file of JSON lines, a JSON array, CSV or Parquet, or hf:NAME; those of --config's run."),
    ] = None
    agent: Annotated[str | None, Option(help=AGENT_HELP)] = None
    remote: Annotated[
        bool,
        Option(
            "--remote",
            help="No agent here: runners join from other machines, as agl runner; the same as --strategy remote.",
        ),
    ] = False
    server: Annotated[
        str | None,
        Option(
            help="Record in the store served at this URL (agl store). Without --agent, its runners provide the agent."
        ),
    ] = None
    key_file: Annotated[Path | None, Option(help="File with the key of --server; AGL_STORE_KEY if not given.")] = None
    val_tasks: Annotated[Path | None, Option(help="Tasks to validate on, never trained.")] = None
    data: Annotated[
        Path | None,
        Option(
            help=(
                'In place of --tasks: conversations that SFT learns, {"messages": […], "tools": […]} per line; with '
                "--algorithm DPO, preferences. An agent is needed only with --val-tasks."
            )
        ),
    ] = None
    algorithm: Annotated[str | None, Option(help="GRPO, DAPO, RLOO, PPO, SFT, DPO, …; GRPO if not given.")] = None
    model: Annotated[
        str | None,
        Option(help="The model to train: a shipped one's name, a directory, a Hugging Face id; or calc."),
    ] = None
    steps: Annotated[int | None, Option(min=1, help="Training steps; as many as the epochs need if not given.")] = None
    seed: Annotated[int | None, Option(help="Seed of the task order and the sampling.")] = None
    config: Annotated[
        Path | None,
        Option(
            help=(
                "Settings by name in a .json, .yaml or .toml file, algorithm and model among them; or a run's "
                "run.json, which repeats that run: its agent or environment, its tasks (up to 10,000 are kept "
                "next to it), its settings. The command line wins."
            )
        ),
    ] = None
    settings: Annotated[list[str], Option("--set", help="NAME=VALUE of a setting, such as steps=20; repeatable.")] = (
        field(default_factory=list)
    )
    computed: BackendOptions = field(default_factory=BackendOptions)
    address: Annotated[
        str | None,
        Option(help="With --backend ray: the cluster, auto or host:port; one of this machine if not given."),
    ] = None
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    program: ProgramOptions = field(default_factory=ProgramOptions)
    timeout: Timeout = None
    concurrency: Concurrency = 16
    n_runners: Annotated[int, Option(min=1, help="Number of runners; each runs --concurrency rollouts at once.")] = 1
    strategy: Annotated[
        Literal["inline", "processes", "ray", "remote"] | None,
        Option(
            metavar="<name>",
            help="Where runners run: inline (in this process), processes, ray (on a cluster) or remote (they join).",
        ),
    ] = None
    providers: UpstreamOptions = field(default_factory=UpstreamOptions)
    name: Annotated[str | None, Option(help="The run's name: its files are in runs/NAME. Or give --run-dir.")] = None
    run_dir: RunDir = None
    resume: Annotated[
        str | None, Option(help="Continue from a run's folder, a checkpoint, or the URL of its checkpoint_copy.")
    ] = None
    log: Annotated[
        list[str],
        Option(help=f"Send metrics to a tracker as well: {', '.join(TRACKERS)}; repeatable."),
    ] = field(default_factory=list)
    trust: Trust = False
    print_config: Annotated[
        bool, Option("--print-config", help="Print all settings as JSON for --config, and train nothing.")
    ] = False


@dataclass(frozen=True, kw_only=True)
class ImportOptions(Command):
    """Make conversations to fine-tune on of traces that other tools recorded.

    Takes trajectories in ATIF, spans of OpenTelemetry and of Phoenix, and observations of Langfuse. They are text: for
    reinforcement learning, run the agent itself.

    agl import traces.jsonl trajectories/ --to chats.jsonl

    agl import trace.json --min-score correctness=0.8
    """

    command = "import"
    work = "agentlightning.cli.import_traces:import_traces"

    sources: Annotated[
        list[Path], Argument(metavar="FILES...", help="Files of JSON or of lines of JSON, or folders of them.")
    ]
    to: Annotated[Path, Option(help="A new file, with a conversation per line.")] = Path("chats.jsonl")
    min_score: Annotated[
        list[str],
        Option(
            metavar="NAME=VALUE",
            help="Only conversations whose score of this name is at least this high; repeatable.",
        ),
    ] = field(default_factory=list)
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class AgentsOptions(Command):
    """List the agents that have a name here, such as claude-code, and which of them are installed.

    agl agents --json                             for programs

    agl train --agent codex --tasks tasks.jsonl --grader "python grade.py" --model ./my-model
    """

    command = "agents"
    work = "agentlightning.cli.known_agents:list_agents"

    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class OptimizeOptions(Command):
    """Tune the prompts of any agent by APO or GEPA, within a budget; its model stays as it is."""

    command = "optimize"
    work = "agentlightning.cli.optimize:optimize_agent"
    goes_with: ClassVar = {
        **dict.fromkeys(("endpoint_model", "api_key"), ("endpoint",)),
        **dict.fromkeys(("critic_model", "critic_key"), ("critic_url", "endpoint")),
        "prompt_place": ("system_prompt",),
    }
    epilog = """\
[bold]Examples[/bold]

An agent with a parameter prompt_template, its prompt in a file:

  agl optimize --agent agent.py:agent --tasks train.jsonl --val-tasks val.jsonl --prompt prompt.txt
  --endpoint https://api.openai.com/v1 --endpoint-model gpt-5-mini --critic-model gpt-5

A program that cannot be edited: the gateway puts the text after its own system prompt:

  agl optimize --agent "node agent.js" --tasks train.jsonl --grader "python grade.py" --system-prompt extra.txt
  --prompt-place after --endpoint http://127.0.0.1:8000/v1 --endpoint-model policy --critic-model policy

Go on with a run that was stopped or killed: the same command and --resume RUN.
"""

    agent: Agent = None
    tasks: Tasks = None
    val_tasks: Annotated[Path | None, Option(help="Tasks to validate on; half of the tasks if not given.")] = None
    algorithm: Annotated[
        Literal["apo", "gepa"],
        Option(help="apo (beam search) or gepa (a Pareto front; needs the extra gepa); apo if not given."),
    ] = "apo"
    prompt: Annotated[
        list[str],
        Option(
            help=("A file with a prompt to tune, or NAME=FILE; prompt_template unless a name is given; repeatable.")
        ),
    ] = field(default_factory=list)
    system_prompt: Annotated[
        list[str],
        Option(
            help=(
                "The system prompt of a program to tune, which the gateway inserts; AGENT=FILE for one of "
                "several agents."
            )
        ),
    ] = field(default_factory=list)
    prompt_place: Annotated[
        Literal["replace", "before", "after"],
        Option(help="Whether --system-prompt goes in place of the program's own, before or after it."),
    ] = "replace"
    tool_description: Annotated[
        list[str], Option(help="TOOL=FILE with the description of a program's tool; repeatable.")
    ] = field(default_factory=list)
    demonstrations: Annotated[
        int | None,
        Option(
            min=1,
            help=(
                "Show up to this many answered examples before the agent's question, chosen from its good runs; "
                "needs no critic."
            ),
        ),
    ] = None
    answer: Annotated[
        str | None, Option(help="With --demonstrations: the field of a task with the right answer to show.")
    ] = None
    model: Annotated[
        str | None,
        Option(help="A local model to serve to the agent: a checkpoint, a directory, a Hugging Face id."),
    ] = None
    endpoint: Annotated[str | None, Option(help="OpenAI-compatible base URL of the agent's model.")] = None
    endpoint_model: Annotated[
        str | None, Option(help="The model to request there; the only model served there if not given.")
    ] = None
    api_key: Annotated[str | None, key_option("OPENAI_API_KEY", "The key for it.")] = None
    critic_url: Annotated[
        str | None, Option(help="OpenAI-compatible base URL of the critic; --endpoint if not given.")
    ] = None
    critic_model: Annotated[
        str | None, Option(help="The critic's model; --endpoint-model if the critic is at --endpoint.")
    ] = None
    critic_key: Annotated[str | None, key_option("AGL_CRITIC_KEY", "The key for it; --api-key if not given.")] = None
    budget_rollouts: Annotated[int | None, Option(min=1, help="Maximum number of rollouts.")] = None
    budget_critic_tokens: Annotated[int, Option(min=1, help="Maximum number of tokens to and from the critic.")] = (
        500_000
    )
    budget_cost: Annotated[float | None, Option(min=0.0, help="Maximum cost; needs --prices.")] = None
    prices: Annotated[
        str | None,
        Option(help="Per million tokens: critic in, critic out, agent in, agent out; such as 1.2,9,0.3,2."),
    ] = None
    settings: Annotated[
        list[str],
        Option("--set", help="NAME=VALUE: a setting of the algorithm, such as beam_rounds=5. Repeatable."),
    ] = field(default_factory=list)
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    program: ProgramOptions = field(default_factory=ProgramOptions)
    timeout: Timeout = None
    concurrency: Concurrency = 16
    run_dir: RunDir = None
    resume: Annotated[Path | None, Option(help="Continue the run in this folder.")] = None


@dataclass(frozen=True, kw_only=True)
class EvalOptions(Command):
    """Compare a trained model with the one it came from on held-out tasks, with confidence intervals.

    agl eval runs/grpo-20250101-120000 --trust    its own agent on its own validation tasks

    agl eval runs/grpo-20250101-120000 --agent my_agent.py:agent --tasks held_out.jsonl
    """

    command = "eval"
    work = "agentlightning.cli.evaluate:run_evaluation"
    goes_with: ClassVar = {"passing": ("pass_at",)}

    checkpoint: Annotated[Path, Argument(help="A checkpoint, a run's folder, or a model.")]
    agent: Annotated[
        str | None,
        Option(help="The agent as file.py:name, or a command; with --trust the one of the run if not given."),
    ] = None
    tasks: Annotated[
        Path | None,
        Option(
            help=(
                "Held-out tasks, one JSON value per line; needed unless the run was an example's, which brings its own."
            )
        ),
    ] = None
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    base: Annotated[str | None, Option(help="Model to compare with; the run's first one if not given.")] = None
    limit: Annotated[int, Option(min=1, help="Use at most this many tasks.")] = 400
    repeats: Annotated[
        int | None, Option(min=1, help="Runs per task; as many as the other options need if not given.")
    ] = None
    pass_at: Annotated[
        int | None, Option(min=1, help="Also estimate the chance that one of this many runs passes (pass@k).")
    ] = None
    passing: Annotated[float, Option(help="The lowest reward that counts as a pass.")] = 1.0
    best_of: Annotated[int | None, Option(min=1, help="Also report the reward of the best of this many runs.")] = None
    seed: Annotated[
        int, Option(help="Seeds the sampling; both models use the same random draws, so that chance differs less.")
    ] = 0
    trust: Trust = False
    as_json: Json = False
