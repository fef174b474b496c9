"""What an algorithm is, and what the trainer gives it to work with."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from agentlightning.errors import ConfigError
from agentlightning.learner.base import Learner
from agentlightning.metrics import Reporter
from agentlightning.store.base import LightningStore
from agentlightning.types import Dataset, NamedResources, ResourcesUpdate


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """The model that an algorithm samples from and trains, as the trainer has to start it."""

    model: str
    """A shipped model's name, a directory, a checkpoint, or a Hugging Face id."""
    device: str = "auto"
    dtype: str = "float32"
    lora_rank: int | None = None
    """None trains all weights; a number trains a LoRA adapter of that rank."""
    policies: Mapping[str, str | None] = field(default_factory=dict)
    """Several policies by alias, each an adapter on `model`: the one in a directory, or None for a new one."""
    frozen: str | None = None
    """With `policies`: an alias for `model` without an adapter."""
    max_context: int = 4096
    """Prompt plus response in tokens, at most what the model can do."""
    max_concurrency: int = 64
    """Requests that are sampled at the same time."""
    temperature: float = 1.0
    """Of training rollouts, whatever the agent asks for: at temperature 0 siblings would all be the same."""
    seed: int | None = None
    """Of what is sampled for requests that bring no seed; with several at once their order has a part in it too."""
    train_agents: str | None = None
    """A regular expression: only calls of agents whose name it finds something in are trained."""
    train_prompts: str | None = None
    """The same for the system prompt of a call."""
    max_calls: int | None = None
    """Model calls that one rollout may make; one that wants more is truncated."""
    max_tokens: int | None = None
    """Tokens that one rollout may have sampled."""
    in_flight: Literal["finish", "continue"] = "finish"
    """What responses that are being sampled do when the weights change."""
    cut_long_prompts: bool = False
    """Shorten prompts that do not fit the context instead of refusing them."""
    renderer: str | None = None
    """How messages become tokens, where it cannot be found out; see the gateway's documentation."""
    reference: str | None = None
    """The model that KL and DPO compare with; None: none is needed."""
    critic: bool = False
    gradient_checkpointing: bool = False

    @property
    def selection(self) -> dict[str, str]:
        """The settings that choose which calls are trained, as far as they are set."""
        given = {"train_agents": self.train_agents, "train_prompts": self.train_prompts}
        return {name: pattern for name, pattern in given.items() if pattern is not None}


def with_trained_agents(spec: PolicySpec, pattern: str | None) -> PolicySpec:
    """The policy trained on the agents that an agent's own `trained_agents` names; None: as it is.

    Raises ConfigError where the settings name others.
    """
    if pattern is None:
        return spec
    if spec.train_agents not in (None, pattern):
        raise ConfigError(
            f"The agent says trained_agents={pattern!r}, the algorithm says train_agents={spec.train_agents!r}. "
            "Give only one of them."
        )
    return replace(spec, train_agents=pattern)


@dataclass(frozen=True, slots=True)
class TrainingContext:
    """What the trainer gives to an algorithm."""

    store: LightningStore
    run_dir: Path
    reporter: Reporter
    resources: ResourcesUpdate | None = None
    """What rollouts run under, unless the algorithm makes others."""
    initial_resources: NamedResources = field(default_factory=dict)
    """What the user gave to the trainer."""
    learner: Learner | None = None
    learners: Mapping[str, Learner] = field(default_factory=dict)
    """Where there are several policies: each one's, by alias."""
    adapter: Any = None
    """What the trainer was given to read spans with; its `adapt` turns those of an attempt into data."""
    llm_proxy: Any = None
    """The gateway in front of the policy, or the one that the trainer was given; None if there is neither."""
    stats: Callable[[], Any] | None = None
    """Async; how the model process spent its time: sampling_s, learning_s, idle_s."""
    turned_away: Mapping[str, int] = field(default_factory=dict)
    """How many requests to the gateway belonged to no attempt, by why they were refused; it goes on counting."""
    selected_by: Mapping[str, str] = field(default_factory=dict)
    """The settings that choose which calls are trained, by name; none: all are."""
    resume_from: Path | None = None
    """The checkpoint to go on from."""
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the user wants to stop; the algorithm saves a checkpoint and returns."""


class Algorithm:
    """Decides what to run and what to learn from it. Override `run`, sync or async."""

    policy: PolicySpec | None = None
    """The model to start for this algorithm; None if it trains none."""
    serial: bool = False
    """Whether rollouts must run one at a time."""

    def __init__(self) -> None:
        self._context: TrainingContext | None = None

    def attach(self, context: TrainingContext) -> None:
        """Called by the trainer before `run`."""
        self._context = context

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
