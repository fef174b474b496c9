"""`agl run`, `agl train` and `agl runner`: any agent. The work is in the modules of these names."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from agentlightning.cli.key_options import key_option
from agentlightning.errors import ConfigError

if TYPE_CHECKING:
    from agentlightning.cli.agents import ProgramOptions


class TaskAs(StrEnum):
    STDIN = "stdin"
    FILE = "file"
    ENV = "env"


class Reward(StrEnum):
    LAST_LINE = "last_line"
    FILE = "file"
    HTTP = "http"


class Isolation(StrEnum):
    BUBBLEWRAP = "bubblewrap"
    KUBERNETES = "kubernetes"


class Strategy(StrEnum):
    INLINE = "inline"
    PROCESSES = "processes"
    RAY = "ray"
    REMOTE = "remote"


_AGENT_HELP = (
    "file.py:name of a function, a command such as 'node agent.js {task.question}', or an agent that has a name here "
    "(agl agents), such as codex."
)
Agent = Annotated[str, typer.Option(help=_AGENT_HELP)]
Tasks = Annotated[
    Path,
    typer.Option(
        help=(
            "Tasks: a file that ends in .jsonl (a JSON value per line), .json (an array), .csv (with a "
            "header) or .parquet."
        )
    ),
]
TaskAsOption = Annotated[
    TaskAs | None,
    typer.Option(help="Where a program finds its task: stdin (JSON), file (path in AGL_TASK_FILE) or env (AGL_TASK)."),
]
RewardOption = Annotated[
    Reward | None,
    typer.Option(
        help=(
            "Where a program's reward is: last_line of its output, file (path in AGL_REWARD_FILE) or http "
            "(POST to AGL_REWARD_URL)."
        )
    ),
]
Grader = Annotated[
    str | None, typer.Option(help="A command that is given the finished run as JSON and prints the reward.")
]
Files = Annotated[Path | None, typer.Option(help="A folder that is copied into each working directory.")]
Workspaces = Annotated[Path | None, typer.Option(help="Keep the working directories here.")]
IsolationOption = Annotated[
    Isolation | None,
    typer.Option(help="Run programs in a sandbox of this machine, or each attempt as a Job of a Kubernetes cluster."),
]
IsolationSetting = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME=VALUE of a setting of --isolation kubernetes, such as image=me/agent:1, which it needs; "
        "may be given many times."
    ),
]
Timeout = Annotated[float | None, typer.Option(min=0.0, help="Seconds for one attempt; an hour if not given.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]
Trust = Annotated[
    bool, typer.Option("--trust", help="Import the code that a run's folder or --config names: its agent, its loss.")
]
Concurrency = Annotated[int, typer.Option(min=1, help="Rollouts that run at the same time.")]
Backend = Annotated[
    str | None, typer.Option(help="Where the model is sampled: embedded, vllm or ray; embedded if not given.")
]
BackendOption = Annotated[
    list[str] | None,
    typer.Option(help="NAME=VALUE of a setting of the backend's own, such as replicas=2; may be given many times."),
]
KeepAnswers = Annotated[
    float,
    typer.Option(
        min=0,
        help=(
            "Minutes (60) that a request may go on from an earlier answer by its id (previous_response_id, "
            "item_reference), and that a session stays one attempt unused: one that its program names in a "
            "header, or a chain of such requests; 0: not at all."
        ),
    ),
]
AllowHost = Annotated[
    list[str] | None,
    typer.Option(help="Another name that clients ask for the server by, as behind a proxy; may be given many times."),
]
UpstreamPrice = Annotated[
    list[str] | None,
    typer.Option(help="NAME=INPUT,OUTPUT[,CACHED_INPUT]: what such a provider asks for a million tokens."),
]
UpstreamLimit = Annotated[
    list[str] | None,
    typer.Option(
        help="NAME.LIMIT=NUMBER: how much of it may be used; LIMIT is calls, tokens or cost (of one rollout), "
        "run_calls, run_tokens or run_cost."
    ),
]
RunDir = Annotated[
    Path | None, typer.Option(help="Where the run leaves its files; a new folder in runs/ if not given.")
]


def run(
    agent: Agent,
    tasks: Tasks,
    model: Annotated[
        str | None, typer.Option(help="Serve this model to it: a shipped one's name, a checkpoint, a directory.")
    ] = None,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help=(
                "Let it ask the provider at this OpenAI-compatible base URL instead, through the gateway, which "
                "records its calls."
            )
        ),
    ] = None,
    endpoint_model: Annotated[str, typer.Option(help="The model to ask for there.")] = "default",
    api_key: Annotated[str | None, key_option("OPENAI_API_KEY", "The key for it.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs per task.")] = 1,
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
    as_json: Json = False,
) -> None:
    """Run an agent on tasks without training, and show its rewards and what went wrong.

    agl run --agent my_agent.py:agent --tasks tasks.jsonl --model calc

    agl run --agent "node agent.js" --tasks tasks.jsonl --endpoint http://127.0.0.1:8000/v1 --endpoint-model policy
    """
    from agentlightning.cli.agents import find_agent
    from agentlightning.cli.run import run_agent
    from agentlightning.trainer.tasks import load_tasks

    run_agent(
        find_agent(agent, program_options(task_as, reward, grader, files, workspaces, isolation, isolation_option)),
        load_tasks(tasks),
        model=model,
        endpoint=endpoint,
        endpoint_model=endpoint_model,
        api_key=api_key,
        repeats=repeats,
        timeout=timeout,
        concurrency=concurrency,
        run_dir=run_dir,
        as_json=as_json,
    )


def train(
    tasks: Annotated[
        Path | None,
        typer.Option(help="Tasks: a file of JSON lines, a JSON array, CSV or Parquet; those of --config's run."),
    ] = None,
    agent: Annotated[str | None, typer.Option(help=_AGENT_HELP)] = None,
    remote: Annotated[
        bool,
        typer.Option(
            "--remote",
            help="No agent here: runners join from other machines, as agl runner; the same as --strategy remote.",
        ),
    ] = False,
    server: Annotated[
        str | None,
        typer.Option(
            help="Record in the store that is served at this URL (agl store). Without --agent its runners have it."
        ),
    ] = None,
    key_file: Annotated[
        Path | None, typer.Option(help="File with the key of --server; AGL_STORE_KEY if not given.")
    ] = None,
    val_tasks: Annotated[Path | None, typer.Option(help="Tasks to validate on, never trained.")] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help=(
                'In place of --tasks: conversations that SFT learns, {"messages": […], "tools": […]} per line. '
                "An agent is needed only with --val-tasks."
            )
        ),
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="GRPO, DAPO, RLOO, PPO, SFT, DPO, …; GRPO if not given.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="The model to train: a shipped one's name, a directory, a Hugging Face id; or calc."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; as many as the epochs need if not given.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides the order of the tasks, and seeds the sampling.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Settings by name in a .json, .yaml or .toml file, algorithm and model among them; or a run's "
                "run.json, which repeats that run: its agent, its tasks (up to 10,000 are kept next to it), its "
                "settings. The command line wins."
            )
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="NAME=VALUE of a setting, such as steps=20; may be given many times."),
    ] = None,
    backend: Backend = None,
    backend_option: BackendOption = None,
    address: Annotated[
        str | None,
        typer.Option(help="With --backend ray: the cluster, auto or host:port; one of this machine if not given."),
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
    n_runners: Annotated[int, typer.Option(min=1, help="Runners, each with so many rollouts at once.")] = 1,
    strategy: Annotated[
        Strategy | None,
        typer.Option(
            metavar="<name>",
            help="Where runners are: inline (in this process), processes, ray (on a cluster) or remote (they join).",
        ),
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(
            help=(
                "NAME=URL of another provider that agents may ask through the gateway, such as a judge; "
                "recorded, never trained; may be given many times."
            )
        ),
    ] = None,
    upstream_key: Annotated[
        str | None, key_option("AGL_UPSTREAM_KEY", "The key that these providers are sent.")
    ] = None,
    upstream_price: UpstreamPrice = None,
    upstream_limit: UpstreamLimit = None,
    name: Annotated[
        str | None, typer.Option(help="The run's name: its files are in runs/NAME. Or give --run-dir.")
    ] = None,
    run_dir: RunDir = None,
    resume: Annotated[
        str | None, typer.Option(help="Go on from a run's folder, a checkpoint, or the URL of its checkpoint_copy.")
    ] = None,
    log: Annotated[
        list[str] | None,
        typer.Option(help="Send metrics to a tracker as well: tensorboard, wandb, mlflow or trackio; may be repeated."),
    ] = None,
    trust: Trust = False,
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print all settings as JSON for --config, and train nothing.")
    ] = False,
) -> None:
    """Train the model behind any agent by GRPO or another algorithm, on this machine.

    agl train --agent my_agent.py:agent --tasks tasks.jsonl --model ./my-model --set steps=50

    agl train --data chats.jsonl --model ./my-model                  fine-tune on good conversations first

    agl train --algorithm DAPO --set steps=50 --print-config         what it would train with

    agl train --config runs/grpo-20250101-120000/run.json --trust    the same run again
    """
    from agentlightning.cli.agents import find_agent
    from agentlightning.cli.configuration import agent_and_tasks, folder_of_run, of_data
    from agentlightning.cli.train import show_config, train_agent
    from agentlightning.cli.trust import require_trust
    from agentlightning.cli.upstream import read_upstreams
    from agentlightning.trainer.tasks import load_tasks

    settings = [*(settings or []), *(f"{n}={v}" for n, v in (("steps", steps), ("seed", seed)) if v is not None)]
    if name is not None:
        run_dir = folder_of_run(name, run_dir)
    if data is not None:
        algorithm, tasks, settings = of_data(data, algorithm, tasks, settings)
    if address is not None:
        backend_option = [*(backend_option or []), f"address={address}"]
    if print_config:
        show_config(algorithm, model, config, settings, backend, backend_option or [], trust)
        return
    known_agent, known_tasks, known_val_tasks = agent_and_tasks(config)
    if tasks is None:
        tasks, val_tasks = known_tasks, val_tasks or known_val_tasks
    if tasks is None:
        raise ConfigError(
            "There are no tasks to train on: give --tasks FILE, --data FILE with conversations, or --config with the "
            "run.json of a run."
        )
    if agent is None and not remote and data is None and server is None:
        agent = known_agent
        if agent is not None and config is not None:
            require_trust(config, [f"the agent {agent}"], trust=trust)
    train_agent(
        None
        if agent is None
        else find_agent(
            agent, program_options(task_as, reward, grader, files, workspaces, isolation, isolation_option)
        ),
        load_tasks(tasks),
        load_tasks(val_tasks) if val_tasks else None,
        algorithm=algorithm,
        model=model,
        config=config,
        settings=settings,
        backend=backend,
        backend_options=backend_option or [],
        timeout=timeout,
        concurrency=concurrency,
        n_runners=n_runners,
        strategy="remote" if remote or (server and agent is None) else strategy and strategy.value,
        server=server,
        key_file=key_file,
        models=read_upstreams(upstream or [], upstream_key, upstream_price or [], upstream_limit or []),
        run_dir=run_dir,
        resume=resume,
        log=log or (),
        trust=trust,
    )


def runner(
    server: Annotated[str, typer.Option(help="URL of the store's server, such as http://10.0.0.1:4747.")],
    agent: Agent,
    key: Annotated[str | None, key_option("AGL_STORE_KEY", "Admin key of that store.")] = None,
    secret_file: Annotated[
        Path | None, typer.Option(help="File with the secret of attempt keys, if it is not derived from the key.")
    ] = None,
    task_as: TaskAsOption = None,
    reward: RewardOption = None,
    grader: Grader = None,
    files: Files = None,
    workspaces: Workspaces = None,
    isolation: IsolationOption = None,
    isolation_option: IsolationSetting = None,
    concurrency: Concurrency = 16,
    max_rollouts: Annotated[int | None, typer.Option(min=1, help="Stop after so many.")] = None,
    give_up_after: Annotated[
        float | None, typer.Option(min=0.0, help="Stop when the server was out of reach for so many seconds.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="The id of the run to work for, where a store holds several.")] = None,
) -> None:
    """Run rollouts for a trainer on another machine; connections go out only. Join and leave at any time.

    agl runner --server http://trainer:4747 --key @key.txt --agent my_agent.py:agent
    """
    from agentlightning.cli.agents import find_agent
    from agentlightning.cli.runner import run_runner

    run_runner(
        find_agent(agent, program_options(task_as, reward, grader, files, workspaces, isolation, isolation_option)),
        server=server,
        key=key,
        secret_file=secret_file,
        concurrency=concurrency,
        max_rollouts=max_rollouts,
        give_up_after=give_up_after,
        run=run,
    )


def agents(as_json: Json = False) -> None:
    """List the agents that have a name here, such as claude-code, and which of them are installed.

    agl agents --json                             for programs

    agl train --agent codex --tasks tasks.jsonl --grader "python grade.py" --model ./my-model
    """
    from agentlightning.cli.known_agents import list_agents

    list_agents(as_json=as_json)


def program_options(
    task_as: TaskAs | None,
    reward: Reward | None,
    grader: str | None,
    files: Path | None,
    workspaces: Path | None,
    isolation: Isolation | None,
    isolation_option: list[str] | None,
) -> ProgramOptions:
    from agentlightning.cli.agents import ProgramOptions, isolation_of

    return ProgramOptions(
        task_as=task_as.value if task_as else None,
        reward=reward.value if reward else None,
        grader=grader,
        files=files,
        workspaces=workspaces,
        isolation=isolation_of(isolation.value if isolation else None, isolation_option or []),
    )
