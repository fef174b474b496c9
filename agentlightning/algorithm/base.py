"""What an algorithm is, and what the trainer gives it to work with.

Also settings that people look for in an algorithm, some by another library's names, with where they belong here
(`OF_TRAINING`, `OF_THE_TRAINER`); and `@algo`, an algorithm that is a function.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.arguments import OTHER_LIBRARIES_NAMES, explained, explained_class
from agentlightning.backend import Backend, BackendFactory, ModelSpec
from agentlightning.errors import ConfigError
from agentlightning.gateway.settings import CallSettings
from agentlightning.litagent import LitAgent
from agentlightning.metrics import Reporter, Sink
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset, NamedResources, ResourcesUpdate
from agentlightning.types.data import GroupReward
from agentlightning.types.finding import Finding


@explained_class
@dataclass(frozen=True, slots=True)
class PolicySpec:
    """What has to be started for an algorithm: the model that it samples from and trains, and how it is served."""

    model: ModelSpec
    calls: CallSettings = field(default_factory=CallSettings)
    backend: str | BackendFactory = "embedded"

    @property
    def selection(self) -> dict[str, str]:
        """The settings that choose which calls are trained, as far as they are set."""
        given = {"train_agents": self.calls.train_agents, "train_prompts": self.calls.train_prompts}
        return {name: pattern for name, pattern in given.items() if pattern is not None}


def with_trained_agents(
    spec: PolicySpec, pattern: str | None, claim: str = "The agent says trained_agents"
) -> PolicySpec:
    """The policy trained on the agents that a pattern names, as `claim`; None: as it is.

    Raises ConfigError where the settings name others.
    """
    if pattern is None:
        return spec
    if spec.calls.train_agents not in (None, pattern):
        raise ConfigError(
            f"{claim}={pattern!r}, the algorithm or the agent says train_agents={spec.calls.train_agents!r}. "
            "Give only one of them."
        )
    return replace(spec, calls=replace(spec.calls, train_agents=pattern))


@dataclass(frozen=True, slots=True)
class Objection:
    """What speaks against learning from a step's rollouts."""

    finding: Finding
    refuses: bool
    """It makes training meaningless."""


Objections = Callable[[Sequence[Any], Mapping[str, Any]], Iterable[Objection]]
"""(episodes of a step, settings by name) → what speaks against learning from them."""


def no_objections(episodes: Sequence[Any], settings: Mapping[str, Any]) -> Iterable[Objection]:
    """A preflight check that finds no objections."""
    return ()


def no_open_calls(rollout_id: str, attempt_id: str) -> int:
    """Reports no open calls, for trainers without a gateway."""
    return 0


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """Everything that the trainer gives to an algorithm."""

    store: LightningStore
    run_dir: Path
    reporter: Reporter
    run_id: str | None = None
    """The run's id in its store. Only this run's runners claim rollouts that carry it."""
    resources: ResourcesUpdate | None = None
    """What rollouts run under, unless the algorithm makes others."""
    initial_resources: NamedResources = field(default_factory=dict)
    """What the user gave to the trainer."""
    adapter: Any = None
    """What the trainer was given to read spans with; its `adapt` turns those of an attempt into data."""
    llm_proxy: Any = None
    """The gateway in front of the policy, or the one that the trainer was given; None if there is neither."""
    backend: Backend | None = None
    """The engines and learners of `Algorithm.policy`; None if it has none."""
    refused_requests: Mapping[str, int] = field(default_factory=dict)
    """How many requests to the gateway belonged to no attempt, by why they were refused; it goes on counting."""
    selected_by: Mapping[str, str] = field(default_factory=dict)
    """The settings that choose which calls are trained, by name; none: all are."""
    group_reward: GroupReward | None = None
    """The agent's, which rewards the training rollouts of a task together."""
    objections: Objections = no_objections
    """Asked about the rollouts of the first step, before they are learned from."""
    open_calls: Callable[[str, str], int] = no_open_calls
    """How many requests of a rollout's attempt the gateway is answering right now."""
    resume_from: Path | None = None
    """The checkpoint to go on from."""
    recipe: str | None = None
    """The same for runs that sample the same from the same weights: a digest of settings, agent and tasks."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the user wants to stop; the algorithm saves a checkpoint and returns."""


@dataclass(frozen=True, slots=True)
class TrainerDefaults:
    """What the configuration that an algorithm was made of says of the trainer; what the trainer is given wins."""

    sinks: Sequence[Sink] = ()
    """Besides those that the trainer is given."""
    run_dir: Path | None = None
    name: str | None = None
    """What a new folder in `runs/` begins with; None: the algorithm's name."""
    port: int | None = None
    resume: Path | None = None


class Algorithm:
    """Decides what to run and what to learn from it. Override `run`, sync or async."""

    _context: TrainingContext | None = None
    trainer_defaults = TrainerDefaults()
    """What it says of the trainer that runs it."""
    keeps_journal: ClassVar[bool] = False
    """Whether it is resumed from its start, with the results of paid calls read back from a journal. It needs no
    checkpoint then: a run's folder is enough."""

    @property
    def policy(self) -> PolicySpec | None:
        """Which model to start for this algorithm; None if it needs none."""
        return None

    @property
    def serial(self) -> bool:
        """Whether the algorithm's rollouts must run one at a time."""
        return False

    def check_agent(self, agent: LitAgent[Any]) -> None:
        """Raises ConfigError for an agent that the algorithm cannot train, before anything is begun."""

    def attach(self, context: TrainingContext) -> None:
        """Called by the trainer before `run`."""
        vars(self)["_context"] = context  # beside the settings, which are frozen

    @property
    def context(self) -> TrainingContext:
        if self._context is None:
            raise RuntimeError(f"{type(self).__name__} is run by a Trainer: Trainer(algorithm=…).fit(agent, tasks).")
        return self._context

    def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Run to the end. May be a coroutine function."""
        raise NotImplementedError(f"{type(self).__name__} does not override run.")


async def run_algorithm(
    algorithm: Algorithm, train_dataset: Dataset[Any] | None, val_dataset: Dataset[Any] | None
) -> Any:
    """Run a sync or async algorithm; a sync one gets a thread, so that it may block."""
    if inspect.iscoroutinefunction(algorithm.run):
        return await algorithm.run(train_dataset, val_dataset)
    return await asyncio.to_thread(algorithm.run, train_dataset, val_dataset)


_BY_THE_AGENT = "The reward comes from the agent: let it return a number, or call agl.emit_reward(…)."
_GIVEN_TO_FIT = "Agent and tasks are given to the trainer: Trainer(algorithm=…).fit(agent, tasks, val_dataset=others)."
_OF_THE_TRAINER = "It is a setting of the trainer: Trainer(algorithm=…, {}=…)."

REWARD = dict.fromkeys(
    ("reward_fn", "reward_func", "reward_funcs", "reward_function", "reward_model", "rubric", "grader", "judge"),
    _BY_THE_AGENT,
)
"""How rollouts are rewarded."""
OF_NAMES = {
    **dict.fromkeys(
        ("run_name", "name", "exp_name", "experiment_name", "project", "project_name", "experiment", "wandb_run_name"),
        "A run is named by its folder, Trainer(run_dir='runs/name'); a tracker's project is its sink's: "
        "Trainer(sinks=[WandbSink(project=…)]).",
    ),
    **dict.fromkeys(
        ("timeout", "timeout_seconds", "rollout_timeout", "max_time"),
        "A rollout ends by GRPO(rollout_config=RolloutConfig(timeout_seconds=600)); in a terminal --timeout 600.",
    ),
}
OF_HOOKS = {
    "callbacks": "Say Trainer(hooks=[Mine()]), whose class Mine is a subclass of agl.Hook.",
    **dict.fromkeys(
        ("verbose", "quiet", "silent", "progress_bar", "show_progress", "disable_tqdm", "verbosity"),
        "A run prints nothing with Trainer(console=agl.metrics.SilentConsole()).",
    ),
}
TRACKERS = dict.fromkeys(
    (
        *("report_to", "logger", "loggers", "log_with", "log_to", "wandb", "use_wandb", "wandb_project", "tensorboard"),
        *("wandb_entity", "mlflow", "tracker", "trackers", "log", "logging"),
        *(
            "log_every",
            "logging_steps",
            "log_steps",
            "log_interval",
            "tracking_uri",
            "mlflow_tracking_uri",
            "use_mlflow",
        ),
    ),
    "Where metrics go is a setting of the trainer: Trainer(algorithm=…, sinks=['wandb']), or sinks=[WandbSink(…)].",
)
"""How other trainers call what records their metrics."""
OF_THE_TRAINER = {
    **REWARD,
    "models": "Models that agents ask besides the policy are the trainer's: Trainer(algorithm=…, models={'judge': …}).",
    **dict.fromkeys(
        ("agent", "tasks", "dataset", "train_dataset", "val_dataset", "val_tasks", "eval_dataset"), _GIVEN_TO_FIT
    ),
    **{
        name: _OF_THE_TRAINER.format(name)
        for name in (
            *("run_dir", "resume", "store", "tracer", "hooks", "port", "console", "sinks"),
            *("n_runners", "concurrency", "strategy"),
        )
    },
    "output_dir": _OF_THE_TRAINER.format("run_dir"),
    **dict.fromkeys(("num_workers", "workers", "n_agents", "num_runners"), _OF_THE_TRAINER.format("n_runners")),
    **TRACKERS,
    **OF_NAMES,
    **OF_HOOKS,
}
"""What a trainer is given, and not an algorithm."""
OF_TRAINING = {
    **OF_THE_TRAINER,
    **dict.fromkeys(
        ("tokenizer", "processing_class"),
        "The tokenizer is the model's own; renderer=… chooses how messages become tokens.",
    ),
    **dict.fromkeys(
        ("args", "config", "cfg", "settings", "params", "kwargs", "training_args"),
        "Each setting is an argument of its own: GRPO(model=…, learning_rate=…).",
    ),
    **dict.fromkeys(
        ("group_reward", "group_reward_fn"),
        "It is the agent's: @agl.rollout(group_reward=…), or a method group_reward of a LitAgent.",
    ),
    **dict.fromkeys(("judge", "reward_model", "llm_judge"), "Say group_judge=agl.GroupJudge(base_url=…, model=…)."),
    **dict.fromkeys(("use_vllm", "fast_inference"), "Say backend='vllm'."),
    **dict.fromkeys(
        ("gpu_memory_utilization", "vllm_gpu_memory_utilization", "vllm_mode", "vllm_config"),
        "Of vLLM there are backend='vllm', backend_options={'gpu_memory_utilization': 0.45} (docs/vllm.md).",
    ),
    **dict.fromkeys(
        ("tensor_parallel_size", "tensor_model_parallel_size", "vllm_tensor_parallel_size", "tp"),
        "tensor_parallel=2 splits the learner's layers; of vLLM: backend_options={'tensor_parallel_size': 2}.",
    ),
    **dict.fromkeys(
        ("zero_stage", "deepspeed", "fsdp", "fsdp_config", "fsdp_size", "param_offload", "optimizer_offload"),
        "ranks=2 spreads the learner over two GPUs, offload=True keeps the optimizer in the machine's memory.",
    ),
    **dict.fromkeys(
        ("early_stopping", "early_stop", "early_stopping_patience", "patience", "target_reward"),
        "Training takes the steps it is given, or until Ctrl-C; keep_checkpoints keeps the best validated, too.",
    ),
    **dict.fromkeys(("bf16", "fp16", "half"), "Say dtype='bfloat16'."),
    **dict.fromkeys(("use_lora", "peft_config", "use_peft"), "Say lora_rank=16."),
    **dict.fromkeys(
        ("lora_alpha", "lora_dropout", "target_modules", "lora_target_modules", "lora_target"),
        "An adapter has alpha 32, no dropout and all linear layers. lora_rank is its size; to learn more or less in a "
        "step, change learning_rate.",
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization", "quantization_config"),
        "Models are not quantised here: what takes least memory is lora_rank=16 with dtype='bfloat16'.",
    ),
    "gradient_accumulation_steps": (
        "A step learns from tasks_per_step × group_size rollouts, however many; tokens_per_batch bounds the memory of "
        "one pass."
    ),
    **dict.fromkeys(
        (
            *("gpus", "num_gpus", "n_gpus", "cuda", "use_gpu", "use_cpu", "n_gpus_per_node", "nproc_per_node"),
            *("devices", "accelerator", "world_size", "num_processes", "nnodes", "num_nodes"),
        ),
        "A GPU is taken where there is one: device='cuda:1' takes another, device='cpu' none; ranks=2 spreads the "
        "learner over two.",
    ),
    **dict.fromkeys(
        (
            *("max_prompt_length", "max_completion_length", "max_response_length", "max_prompt_len"),
            *("max_response_len", "prompt_max_len", "generate_max_len", "response_length", "prompt_length"),
        ),
        "max_context bounds prompt and response together; the agent says max_tokens in its calls.",
    ),
    **dict.fromkeys(
        ("actor_rollout_ref", "actor", "rollout", "trainer", "data", "algorithm"),
        "These are groups of verl's configuration, which  agl.VERL(config)  reads whole. Here each setting stands "
        "alone: GRPO(model=…, group_size=8, tasks_per_step=16, learning_rate=…).",
    ),
    **dict.fromkeys(
        ("system_prompt", "prompt_template", "tools", "stop", "stop_strings", "stop_sequences"),
        "That is the agent's: it says so in its requests to the model.",
    ),
    **dict.fromkeys(("optimizer", "optim"), "It is AdamW, with learning_rate and weight_decay."),
    **dict.fromkeys(("logging_steps", "log_every"), "Every step is written to metrics.jsonl and printed."),
}
"""What a training algorithm is not given."""


def of_the_algorithm(settings: Collection[str], others: Collection[str]) -> Mapping[str, str]:
    """What is said of an algorithm's setting that a trainer is given, by its name here and by those of other libraries.
    `others`: names in `OF_TRAINING` to be said, too."""
    names = {theirs: ours for theirs, ours in OTHER_LIBRARIES_NAMES.items() if ours in settings}
    sentences = {theirs: f"{theirs} is called {ours} here, a setting" for theirs, ours in names.items()}
    sentences |= {name: f"{name} is a setting" for name in settings}
    shown = {name: ours if (ours := names.get(name, name)) == "model" else f"model=…, {ours}" for name in sentences}
    of = "of the algorithm: Trainer(algorithm=GRPO("
    return {name: f"{words} {of}{shown[name]}=…))." for name, words in sentences.items()} | {
        name: OF_TRAINING[name] for name in others if name not in settings
    }


_GIVEN: dict[str, Callable[[TrainingContext], Any]] = {
    "store": lambda context: context.store,
    "initial_resources": lambda context: context.initial_resources,
    "llm_proxy": lambda context: context.llm_proxy,
    "adapter": lambda context: context.adapter,
    "context": lambda context: context,
}
"""What a function may ask for besides the data sets, and where it is found."""


class FunctionalAlgorithm(Algorithm):
    """An algorithm made of a function. Calling it calls the function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function
        self._parameters = inspect.signature(function).parameters
        functools.update_wrapper(self, function)
        known = {*_GIVEN, "train_dataset", "val_dataset"}
        kinds = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
        for name, parameter in self._parameters.items():
            if name not in known and parameter.default is parameter.empty and parameter.kind not in kinds:
                raise ConfigError(
                    f"The algorithm {function.__name__} asks for {name!r}, which nobody gives it. It can ask for "
                    f"{', '.join(sorted(known))}; anything else needs a default."
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    async def run(self, train_dataset: Dataset[Any] | None = None, val_dataset: Dataset[Any] | None = None) -> Any:
        """Call the function with what it asks for; one that is not async runs in a thread.

        Raises ConfigError for a data set that the function does not take.
        """
        given = {name: find(self.context) for name, find in _GIVEN.items() if name in self._parameters}
        for name, dataset in (("train_dataset", train_dataset), ("val_dataset", val_dataset)):
            if name in self._parameters:
                given[name] = dataset
            elif dataset is not None:
                raise ConfigError(
                    f"The algorithm {self._function.__name__} takes no {name}, and one was given to fit. Add the "
                    f"parameter {name}, or leave the data out."
                )
        if inspect.iscoroutinefunction(self._function):
            return await self._function(**given)
        return await asyncio.to_thread(lambda: self._function(**given))


@explained
def algo(function: Callable[..., Any]) -> FunctionalAlgorithm:
    """Make an algorithm of `async def f(*, store, train_dataset, …)`, or of a plain function.

    It is given, by name, what it asks for: `store`, `train_dataset`, `val_dataset`, `initial_resources`, `llm_proxy`,
    `adapter`, and `context` for everything else.
    """
    return FunctionalAlgorithm(function)
