"""The command tree. Each command's work is in a module of its own, imported when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentlightning.cli import agent_commands, export_command, look_commands, optimize_command
from agentlightning.cli.key_options import key_option
from agentlightning.cli.store_commands import store_app
from agentlightning.cli.usage import Commands
from agentlightning.errors import ConfigError

app = typer.Typer(
    name="agl",
    cls=Commands,
    help="Agent Lightning: train any LLM agent with (almost) no change to its code.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def _version(show: bool) -> None:
    if show:
        from agentlightning import __version__

        typer.echo(f"Agent Lightning {__version__}, an independent implementation of agentlightning's names and ideas.")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Agent Lightning: train any LLM agent with (almost) no change to its code."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ConfigError("The folder that you are in was deleted. Go to another one with cd.") from None


@app.command()
def demo(
    name: Annotated[str, typer.Argument(help="Which example; --list names them.")] = "calc",
    listed: Annotated[bool, typer.Option("--list", help="Name the examples that run by themselves.")] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="A shipped model's name, a model directory, or a Hugging Face id; the example's own if not given."
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Training steps; the example's own number if not given.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Decides the order of the tasks, and seeds the sampling.")] = 0,
    learning_rate: Annotated[float | None, typer.Option(min=0.0, help="Step size of AdamW.")] = None,
    lora_rank: Annotated[int | None, typer.Option(min=1, help="Train a LoRA adapter of this rank.")] = None,
    run_dir: Annotated[
        Path | None, typer.Option(help="Where the run leaves its files; a new folder runs/NAME-… if not given.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on from a run's folder or a checkpoint.")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the gateway; a free one if not given.")] = None,
) -> None:
    """Train an example agent by reinforcement learning, on this machine, and watch it get better.

    agl demo calc --seed 1

    agl demo sentiment                            a real language model, downloaded once (93 MB)

    agl demo calc --resume runs/calc-20250101-120000

    agl demo --list
    """
    from agentlightning.cli.demo import list_demos, run_demo

    if listed:
        list_demos()
        return
    run_demo(
        name,
        model=model,
        steps=steps,
        seed=seed,
        learning_rate=learning_rate,
        lora_rank=lora_rank,
        run_dir=run_dir,
        resume=resume,
        port=port,
    )


app.command()(agent_commands.train)
app.command(epilog=optimize_command.EPILOG)(optimize_command.optimize)
app.command()(agent_commands.run)


@app.command("eval")
def evaluate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint, a run's folder, or a model.")],
    agent: Annotated[
        str | None,
        typer.Option(help="The agent as file.py:name, or a command; with --trust the one of the run if not given."),
    ] = None,
    tasks: Annotated[
        Path | None,
        typer.Option(
            help=(
                "Held-out tasks, one JSON value per line; needed unless the run was an example's, which brings its own."
            )
        ),
    ] = None,
    base: Annotated[str | None, typer.Option(help="Model to compare with; the run's first one if not given.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Use at most so many tasks.")] = 400,
    repeats: Annotated[
        int | None, typer.Option(min=1, help="Runs per task; as many as the other options need if not given.")
    ] = None,
    pass_at: Annotated[
        int | None, typer.Option(min=1, help="Also the chance that one of so many runs passes (pass@k).")
    ] = None,
    passing: Annotated[float, typer.Option(help="The reward from which a run passes.")] = 1.0,
    best_of: Annotated[int | None, typer.Option(min=1, help="Also what the best of so many runs earns.")] = None,
    trust: agent_commands.Trust = False,
    as_json: agent_commands.Json = False,
) -> None:
    """Compare a trained model with the one it came from on held-out tasks, with confidence intervals.

    agl eval runs/grpo-20250101-120000 --trust    its own agent on its own validation tasks

    agl eval runs/grpo-20250101-120000 --agent my_agent.py:agent --tasks held_out.jsonl
    """
    from agentlightning.cli.evaluate import EvalOptions, run_evaluation

    wanted = EvalOptions(repeats=repeats, pass_at=pass_at, best_of=best_of, passing=passing, as_json=as_json)
    run_evaluation(checkpoint, agent=agent, tasks=tasks, base=base, limit=limit, wanted=wanted, trust=trust)


app.command()(look_commands.show)
app.command()(look_commands.models)
app.command()(look_commands.plan)
app.command()(look_commands.doctor)
app.command()(look_commands.why)
app.command()(look_commands.whatif)
app.command()(look_commands.judge)
app.command()(look_commands.runs)
app.command()(look_commands.compare)
app.command()(look_commands.watch)
app.command()(look_commands.report)
app.command()(export_command.export)


@app.command()
def dashboard(
    where: Annotated[
        str | None,
        typer.Argument(
            help="A run's folder, a folder of runs (its latest), a store's file, http://… or postgresql://…; the "
            "latest of runs/ if not given."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 0,
    key: Annotated[str | None, key_option("AGL_STORE_KEY", "What one logs in with.")] = None,
    allow_host: agent_commands.AllowHost = None,
    browser: Annotated[bool, typer.Option("--open/--no-open", help="Open it in a browser.")] = True,
) -> None:
    """Show runs, rollouts, tokens and groups in a browser; also of a run that is going on.

    agl dashboard                                 all runs in runs/

    agl dashboard runs/grpo-20250101-120000
    """
    from agentlightning.cli.dashboard import show_dashboard

    show_dashboard(where, host, port, key, browser=browser, allow_hosts=allow_host or [])


@app.command()
def serve(
    model: Annotated[
        str | None, typer.Argument(help="A checkpoint, a shipped model's name, a directory, or a Hugging Face id.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What /v1/models calls it; the run's or the model's name if not given.")
    ] = None,
    training: Annotated[
        Path | None,
        typer.Option(
            help="Serve OpenAI's fine-tuning API, too, and keep its files, jobs and models in this folder. --api-key "
            "is the admin key then, which makes others."
        ),
    ] = None,
    base_models: Annotated[
        Path | None,
        typer.Option(help="With --training: a TOML or JSON file that maps the names clients ask for to models."),
    ] = None,
    agent: Annotated[
        list[str] | None,
        typer.Option(
            help="With --training: NAME=FILE.py:AGENT, an agent that reinforcement jobs may train by this name; may be "
            "given many times."
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.")] = 8000,
    api_key: Annotated[
        str | None, key_option("AGL_API_KEY", "Key that clients must send; one is made with --training.")
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="With --training: let everybody on this machine train.")
    ] = False,
    allow_host: agent_commands.AllowHost = None,
    max_context: Annotated[
        int, typer.Option(min=1, help="Tokens of a prompt with its answer; fewer let more requests run at once.")
    ] = 4096,
    keep_answers: agent_commands.KeepAnswers = 60.0,
    strict: Annotated[
        bool, typer.Option(help="Refuse requests with fields or tools that have no effect here, by name.")
    ] = False,
    backend: agent_commands.Backend = None,
    backend_option: agent_commands.BackendOption = None,
) -> None:
    """Serve a model over the OpenAI API.

    agl serve runs/grpo-20250101-120000           a run's last checkpoint

    agl serve calc --port 8080

    agl serve calc --training served              with OpenAI's fine-tuning API
    """
    if training is not None or base_models is not None or agent or no_key:
        from agentlightning.cli.serve_training import run_training_server

        run_training_server(
            model,
            training,
            base_models,
            host=host,
            port=port,
            admin_key=api_key,
            max_context=max_context,
            allow_hosts=allow_host or [],
            agents=agent or [],
            open_to_all=no_key,
            others={
                "--name": name,
                "--strict": strict or None,
                "--backend": backend,
                "--backend-option": backend_option,
                "--keep-answers": keep_answers if keep_answers != 60.0 else None,
            },
        )
        return
    from agentlightning.cli.serve import run_server

    if model is None:
        raise ConfigError("Say what to serve: agl serve MODEL.")
    run_server(
        model,
        host=host,
        port=port,
        api_key=api_key,
        name=name,
        allow_hosts=allow_host or [],
        strict=strict,
        keep_answers=keep_answers,
        max_context=max_context,
        backend=backend,
        backend_options=backend_option or [],
    )


app.command()(agent_commands.runner)
app.command()(agent_commands.agents)


@app.command()
def gateway(
    model: Annotated[
        str | None, typer.Option(help="Serve this model: a checkpoint, a directory, a Hugging Face id.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="What clients call --model; the run's or the model's name if not given.")
    ] = None,
    upstream: Annotated[
        list[str] | None,
        typer.Option(help="NAME=URL of another provider, which clients may then name; may be given many times."),
    ] = None,
    upstream_key: Annotated[str | None, key_option("AGL_UPSTREAM_KEY", "API key for the providers.")] = None,
    upstream_price: agent_commands.UpstreamPrice = None,
    upstream_limit: agent_commands.UpstreamLimit = None,
    path: Annotated[Path, typer.Option(help="SQLite file to record in; gateway.db if not given.")] = Path("gateway.db"),
    server: Annotated[str | None, typer.Option(help="Record in the store that is served at this URL instead.")] = None,
    key: Annotated[str | None, key_option("AGL_STORE_KEY", "Admin key of that store.")] = None,
    secret_file: Annotated[
        Path | None,
        typer.Option(
            help=(
                "File with the secret of attempt keys, as for agl store: their holders may call too; derived "
                "from --key if not given, as runners do."
            )
        ),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; other than loopback needs --api-key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, key_option("AGL_API_KEY", "Key that clients must send; one is made with --upstream-key.")
    ] = None,
    no_key: Annotated[
        bool, typer.Option("--no-key", help="Let everybody on this machine spend by --upstream-key.")
    ] = False,
    allow_host: agent_commands.AllowHost = None,
    keep_answers: agent_commands.KeepAnswers = 60.0,
    strict: Annotated[
        bool, typer.Option(help="Refuse requests with fields or tools that have no effect here, by name.")
    ] = False,
) -> None:
    """Run the gateway alone, in front of a model or of other providers: every call is recorded in a store.

    agl gateway --model calc --path calls.db

    agl gateway --upstream gpt=https://api.openai.com/v1 --upstream-key @key.txt --path calls.db
    """
    from agentlightning.cli.gateway import run_gateway

    run_gateway(
        model=model,
        name=name,
        upstreams=upstream or [],
        upstream_key=upstream_key,
        upstream_prices=upstream_price or [],
        upstream_limits=upstream_limit or [],
        path=path,
        server=server,
        store_key=key,
        secret_file=secret_file,
        host=host,
        port=port,
        api_key=api_key,
        open_to_all=no_key,
        allow_hosts=allow_host or [],
        strict=strict,
        keep_answers=keep_answers,
    )


app.add_typer(store_app)


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def prometheus() -> None:
    """Says where the counters are: `agl store` serves them at /metrics, in Prometheus' format."""
    from agentlightning.errors import ConfigError

    raise ConfigError("There is nothing to start: `agl store` serves its counters at /metrics of its own address.")


@app.command(hidden=True, context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def vllm() -> None:
    """Says how vLLM's server is used: as it is, behind the gateway."""
    from agentlightning.errors import ConfigError

    raise ConfigError(
        "vLLM's own server needs no change: start it with `vllm serve MODEL`, and put the gateway in front of it with "
        "`agl gateway --upstream NAME=http://127.0.0.1:8000/v1`."
    )
