"""The `agl export` command and its options. The work is in modules of its own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from agentlightning.errors import ConfigError


class Form(StrEnum):
    """As in `adapter.finetuning`."""

    OPENAI = "openai"
    TOGETHER = "together"
    MISTRAL = "mistral"


class Mode(StrEnum):
    """As in `types`."""

    TRAIN = "train"
    VAL = "val"
    TEST = "test"


def export(
    source: Annotated[str, typer.Argument(help="A run's folder (its last checkpoint), a checkpoint, or a model.")],
    to: Annotated[Path | None, typer.Option(help="A new folder for the model, in Hugging Face format.")] = None,
    merged: Annotated[bool, typer.Option("--merged", help="Merge a LoRA adapter into its base model.")] = False,
    gguf: Annotated[
        bool, typer.Option("--gguf", help="Write one file for llama.cpp, Ollama and LM Studio instead: model.gguf.")
    ] = False,
    push: Annotated[
        str | None,
        typer.Option(
            help=("Push it to this repository of the Hugging Face Hub; takes the token of HF_TOKEN or hf auth login.")
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Let everybody see a repository that is made.")] = False,
    policy: Annotated[str | None, typer.Option(help="Which one, of a run that trained several policies.")] = None,
    jsonl: Annotated[
        Path | None, typer.Option(help="Conversations instead of the model: a new file, a line for each.")
    ] = None,
    parquet: Annotated[
        Path | None,
        typer.Option(
            help=(
                "The same as a table, for the datasets of Hugging Face and for trl: messages, tools (JSON), "
                "reward, task (JSON), rollout_id."
            )
        ),
    ] = None,
    form: Annotated[
        Form,
        typer.Option("--format", metavar="<name>", help=f"The fine-tuning service that reads it: {', '.join(Form)}."),
    ] = Form.OPENAI,
    min_reward: Annotated[float | None, typer.Option(help="Only rollouts that earned at least so much.")] = None,
    best_per_task: Annotated[
        bool, typer.Option("--best-per-task", help="Of each task only the rollout that earned most.")
    ] = False,
    mode: Annotated[
        Mode | None,
        typer.Option(help="Train, val or test; without it those that were run to train, or all where there is none."),
    ] = None,
    agent: Annotated[
        str | None, typer.Option(help="Only agents in whose name this regular expression finds something.")
    ] = None,
) -> None:
    """Take a trained model out of a run: as it is, merged, as GGUF, or pushed to the Hugging Face Hub.

    Or, with --jsonl, its good conversations, with their tools, as fine-tuning services accept them; with --parquet as
    a table for the `datasets` of Hugging Face and for trl.

    agl export runs/grpo-20250101-120000 --to my-model --merged

    agl export runs/grpo-20250101-120000/checkpoints/step-000040 --to my-gguf --gguf

    agl export runs/grpo-20250101-120000 --push me/my-model

    agl export runs/grpo-20250101-120000 --jsonl good.jsonl --min-reward 1 --best-per-task --format together
    """
    if jsonl is not None or parquet is not None:
        if to is not None or push is not None or merged or gguf:
            raise ConfigError(
                "--jsonl and --parquet write conversations; the model is exported by a command of its own."
            )
        if parquet is not None and parquet.suffix != ".parquet":
            raise ConfigError(f"--parquet {parquet}: the name of the file should end in .parquet.")
        for file in filter(None, (jsonl, parquet)):
            _conversations(Path(source), file, form, min_reward, best_per_task, mode, agent)
        return
    if min_reward is not None or best_per_task or mode is not None or agent is not None:
        raise ConfigError("Which rollouts are chosen plays a part with --jsonl FILE or --parquet FILE only.")
    from agentlightning.cli import export_model

    if public and push is None:
        raise ConfigError("--public is for a repository that is made with --push.")
    wanted = export_model.Form(to=to, merged=merged, gguf=gguf, push=push, private=not public, policy=policy)
    export_model.export_model(source, wanted)


def _conversations(
    run: Path,
    to: Path,
    form: Form,
    min_reward: float | None,
    best_per_task: bool,
    mode: Mode | None,
    agent: str | None,
) -> None:
    from agentlightning import types
    from agentlightning.algorithm.supervised import Good
    from agentlightning.cli.export import export_conversations

    good = Good(
        min_reward=min_reward,
        best_of=1 if best_per_task else None,
        mode=None if mode is None else types.RolloutMode(mode.value),
    )
    export_conversations(run, to, form.value, good, agent)
