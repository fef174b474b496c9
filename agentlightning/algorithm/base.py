"""What an algorithm is, and what the trainer gives it to work with. Also `@algo`, an algorithm that is a function."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from agentlightning.arguments import explained, explained_class
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
