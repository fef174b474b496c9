"""Commands to begin with."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from typer import Argument, Option

from agentlightning.cli.command import Command
from agentlightning.cli.key_options import key_option
from agentlightning.cli.options import (
    Agent,
    Concurrency,
    EnvironmentOptions,
    Json,
    ProgramOptions,
    RunDir,
    Tasks,
    Timeout,
)

Gpus = Annotated[str | None, Option(help="The GPUs to use: 4xH100, L4, or cpu; what this machine has if not given.")]


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Command):
    """Train an example agent by reinforcement learning, on this machine, and watch it get better.

    agl demo calc --seed 1

    agl demo sentiment                            a real language model, downloaded once (93 MB)

    agl demo calc --resume runs/calc-20250101-120000

    agl demo --list
    """

    command = "demo"
    work = "agentlightning.cli.demo:run_demo"

    name: Annotated[str, Argument(help="Which example; --list names them.")] = "calc"
    listed: Annotated[bool, Option("--list", help="List the examples that it can run.")] = False
    model: Annotated[
        str | None,
        Option(help="A shipped model's name, a model directory, or a Hugging Face id; the example's own if not given."),
    ] = None
    steps: Annotated[int | None, Option(min=1, help="Training steps; the example's own number if not given.")] = None
    seed: Annotated[int, Option(help="Seed of the task order and the sampling.")] = 0
    learning_rate: Annotated[float | None, Option(min=0.0, help="Step size of AdamW.")] = None
    lora_rank: Annotated[int | None, Option(min=1, help="Train a LoRA adapter of this rank.")] = None
    run_dir: Annotated[
        Path | None, Option(help="Folder for the run's files; a new folder runs/NAME-… if not given.")
    ] = None
    resume: Annotated[Path | None, Option(help="Continue from a run's folder or a checkpoint.")] = None
    port: Annotated[int | None, Option(min=0, max=65535, help="Port of the gateway; a free one if not given.")] = None


@dataclass(frozen=True, kw_only=True)
class ModelsOptions(Command):
    """List models to train: which ship, which are in the local cache, and what each takes on this machine.

    agl models

    agl models --gpus 2xL4
    """

    command = "models"
    work = "agentlightning.cli.models:list_models"

    gpus: Gpus = None
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Command):
    """Say on paper whether a training fits, how long a step takes, and which backend to take. Exits with 1 if not.

    agl plan --model Qwen/Qwen3-8B --gpus 2xH100 --lora-rank 16

    agl plan --model 4B --gpus L4 --context 8192
    """

    command = "plan"
    work = "agentlightning.cli.plan:plan_training"

    model: Annotated[
        str,
        Option(
            help=(
                "A shipped model's name, a directory, a Hugging Face id, or a size: 135M, 0.6B, 1.7B, 4B, 8B, "
                "14B, 30B-A3B, 32B, 70B."
            )
        ),
    ]
    gpus: Gpus = None
    lora_rank: Annotated[int | None, Option(min=1, help="Train an adapter of this rank.")] = None
    dtype: Annotated[
        str | None, Option(help="Type of the weights; bfloat16 on GPUs and float32 on processors if not given.")
    ] = None
    context: Annotated[
        int | None, Option(min=16, help="Tokens of the longest rollout; 4096 if the model can do as much.")
    ] = None
    response: Annotated[
        int | None,
        Option(min=1, help="Sampled tokens of the longest rollout, all calls together; a quarter if not given."),
    ] = None
    group_size: Annotated[int, Option(min=1, help="Rollouts per task.")] = 8
    tasks_per_step: Annotated[int, Option(min=1, help="Tasks per step.")] = 16
    concurrency: Annotated[int, Option(min=1, help="Concurrent requests.")] = 64
    tokens_per_batch: Annotated[int, Option(min=1, help="Tokens in one pass of the learner.")] = 16_384
    gradient_checkpointing: Annotated[
        bool, Option("--gradient-checkpointing", help="Recompute activations instead of keeping them.")
    ] = False
    offload: Annotated[bool, Option("--offload", help="Keep the optimiser in the host's memory.")] = False
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(Command):
    """Run a few rollouts of an agent and say what stands in the way of training it. Exits with 1 for a problem.

    agl doctor --agent my_agent.py:agent --tasks tasks.jsonl

    agl doctor --agent "node agent.js" --tasks tasks.jsonl --model ./my-model
    """

    command = "doctor"
    work = "agentlightning.cli.doctor:examine_agent"
    goes_with: ClassVar = dict.fromkeys(("endpoint_model", "api_key"), ("endpoint",))

    agent: Agent = None
    tasks: Tasks = None
    model: Annotated[
        str | None, Option(help="The model to ask: a shipped one's name, a directory; calc if not given.")
    ] = None
    endpoint: Annotated[str | None, Option(help="Use the provider at this OpenAI-compatible base URL instead.")] = None
    endpoint_model: Annotated[str, Option(help="The model to request there.")] = "default"
    api_key: Annotated[str | None, key_option("OPENAI_API_KEY", "The key for it.")] = None
    limit: Annotated[int, Option(min=1, help="Number of tasks to try.")] = 4
    repeats: Annotated[
        int,
        Option(min=1, help="Rollouts of each task, to compare; at least eight if there is only one task."),
    ] = 4
    seconds: Annotated[
        float, Option(min=1.0, help="Stop after this many seconds and report what was seen by then.")
    ] = 45.0
    group_size: Annotated[int, Option(min=2, help="Rollouts of a task that the training compares.")] = 8
    tasks_per_step: Annotated[int, Option(min=1, help="Tasks per step of the planned training.")] = 16
    max_context: Annotated[int, Option(min=1, help="Tokens of the longest rollout of the planned training.")] = 4096
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    program: ProgramOptions = field(default_factory=ProgramOptions)
    concurrency: Concurrency = 16
    as_json: Json = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(Command):
    """Run an agent on tasks without training, and show its rewards and what went wrong.

    agl run --agent my_agent.py:agent --tasks tasks.jsonl --model calc

    agl run --agent "node agent.js" --tasks tasks.jsonl --endpoint http://127.0.0.1:8000/v1 --endpoint-model policy
    """

    command = "run"
    work = "agentlightning.cli.run:run_agent"
    goes_with: ClassVar = dict.fromkeys(("endpoint_model", "api_key"), ("endpoint",))

    agent: Agent = None
    tasks: Tasks = None
    model: Annotated[
        str | None, Option(help="Serve this model to the agent: a shipped one's name, a checkpoint, a directory.")
    ] = None
    endpoint: Annotated[
        str | None,
        Option(
            help=(
                "Use the provider at this OpenAI-compatible base URL instead, through the gateway, which "
                "records its calls."
            )
        ),
    ] = None
    endpoint_model: Annotated[str, Option(help="The model to request there.")] = "default"
    api_key: Annotated[str | None, key_option("OPENAI_API_KEY", "The key for it.")] = None
    repeats: Annotated[int, Option(min=1, help="Runs per task.")] = 1
    environment: EnvironmentOptions = field(default_factory=EnvironmentOptions)
    program: ProgramOptions = field(default_factory=ProgramOptions)
    timeout: Timeout = None
    concurrency: Concurrency = 16
    run_dir: RunDir = None
    as_json: Json = False
