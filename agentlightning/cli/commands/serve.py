"""Commands that take a trained model into use."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from typer import Argument, Option

from agentlightning.cli.command import Command
from agentlightning.cli.key_options import key_option
from agentlightning.cli.options import AllowHost, BackendOptions, KeepAnswers, Strict

Form = Literal["openai", "together", "mistral"]
"""As in `adapter.finetuning`."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions(Command):
    """Serve a model over the OpenAI API.

    agl serve runs/grpo-20250101-120000           a run's last checkpoint

    agl serve calc --port 8080

    agl serve calc --training served              with the fine-tuning APIs of OpenAI and Tinker
    """

    command = "serve"

    model: Annotated[
        str | None, Argument(help="A checkpoint, a shipped model's name, a directory, or a Hugging Face id.")
    ] = None
    name: Annotated[
        str | None, Option(help="What /v1/models calls it; the run's or the model's name if not given.")
    ] = None
    training: Annotated[
        Path | None,
        Option(
            help="Serve the fine-tuning APIs of OpenAI and Tinker, too, and keep their files, jobs and models in this "
            "folder. --api-key is the admin key then, which makes others."
        ),
    ] = None
    base_models: Annotated[
        Path | None,
        Option(help="With --training: a TOML or JSON file that maps the names clients ask for to models."),
    ] = None
    agent: Annotated[
        list[str],
        Option(
            help="With --training: NAME=FILE.py:AGENT or NAME=COMMAND, an agent that reinforcement jobs may train by "
            "this name; repeatable."
        ),
    ] = field(default_factory=list)
    quota: Annotated[
        list[str],
        Option(
            help="With --training: NAME=NUMBER of what each key may have: file_bytes of one file, stored_bytes of all, "
            "open_jobs, checkpoint_bytes of all checkpoints, records of each kind; repeatable."
        ),
    ] = field(default_factory=list)
    host: Annotated[str, Option(help="Address to listen on; other than loopback needs --api-key.")] = "127.0.0.1"
    port: Annotated[int, Option(min=0, max=65535, help="Port to listen on.")] = 8000
    api_key: Annotated[
        str | None, key_option("AGL_API_KEY", "Key that clients must send; one is made with --training.")
    ] = None
    no_key: Annotated[bool, Option("--no-key", help="With --training: let everybody on this machine train.")] = False
    allow_host: AllowHost = field(default_factory=list)
    max_context: Annotated[
        int, Option(min=1, help="Tokens of a prompt with its answer; fewer let more requests run at once.")
    ] = 4096
    keep_answers: KeepAnswers = 60.0
    strict: Strict = False
    computed: BackendOptions = field(default_factory=BackendOptions)

    @property
    def work(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        trains = self.training is not None or self.base_models is not None or self.agent or self.quota or self.no_key
        return "agentlightning.cli." + ("serve_training:run_training_server" if trains else "serve:run_server")


@dataclass(frozen=True, kw_only=True)
class ExportOptions(Command):
    """Take a trained model out of a run: as it is, merged, as GGUF, or pushed to the Hugging Face Hub.

    Or, with --jsonl, its good conversations, with their tools, as fine-tuning services accept them; with --parquet as
    a table for the `datasets` of Hugging Face and for trl; with --atif its trajectories, token by token.

    agl export runs/grpo-20250101-120000 --to my-model --merged

    agl export runs/grpo-20250101-120000/checkpoints/step-000040 --to my-gguf --gguf

    agl export runs/grpo-20250101-120000 --push me/my-model

    agl export runs/grpo-20250101-120000 --jsonl good.jsonl --min-reward 1 --best-per-task --format together

    agl export runs/grpo-20250101-120000 --atif trajectories
    """

    command = "export"
    goes_with: ClassVar = {"form": ("jsonl", "parquet"), "agent": ("jsonl", "parquet")}

    source: Annotated[str, Argument(help="A run's folder (its last checkpoint), a checkpoint, or a model.")]
    to: Annotated[Path | None, Option(help="A new folder for the model, in Hugging Face format.")] = None
    merged: Annotated[bool, Option("--merged", help="Merge a LoRA adapter into its base model.")] = False
    gguf: Annotated[
        bool, Option("--gguf", help="Write one file for llama.cpp, Ollama and LM Studio instead: model.gguf.")
    ] = False
    push: Annotated[
        str | None,
        Option(help="Push to this Hugging Face Hub repository; uses the token of HF_TOKEN or hf auth login."),
    ] = None
    public: Annotated[bool, Option("--public", help="Make a new repository public.")] = False
    policy: Annotated[str | None, Option(help="The policy to export, if the run trained several.")] = None
    jsonl: Annotated[Path | None, Option(help="Conversations instead of the model: a new file, a line for each.")] = (
        None
    )
    parquet: Annotated[
        Path | None,
        Option(
            help=(
                "The same as a table, for the datasets of Hugging Face and for trl: messages, tools (JSON), "
                "reward, task (JSON), rollout_id."
            )
        ),
    ] = None
    atif: Annotated[
        Path | None,
        Option(
            help="Trajectories instead: a new folder with a file for each rollout, in ATIF 1.8, with the exact tokens "
            "and their log-probabilities."
        ),
    ] = None
    form: Annotated[
        Form,
        Option(
            "--format", metavar="<name>", help=f"The fine-tuning service that reads it: {', '.join(get_args(Form))}."
        ),
    ] = "openai"
    min_reward: Annotated[float | None, Option(help="Only rollouts that earned at least this much.")] = None
    best_per_task: Annotated[bool, Option("--best-per-task", help="Only the best rollout of each task.")] = False
    mode: Annotated[
        Literal["train", "val", "test"] | None,
        Option(help="Train, val or test; without it those that were run to train, or all where there is none."),
    ] = None
    agent: Annotated[str | None, Option(help="Only agents whose name matches this regular expression.")] = None

    @property
    def work(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        conversations = any(place is not None for place in (self.jsonl, self.parquet, self.atif))
        return "agentlightning.cli." + ("export:export_files" if conversations else "export_model:export_model")
