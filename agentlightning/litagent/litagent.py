"""`LitAgent`: the class form of an agent, and the resources as it is given them. An agent knows its task and its
resources, nothing of stores or training.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from agentlightning.arguments import explained
from agentlightning.errors import ConfigError, UnknownResourceError
from agentlightning.keys import ALL_SCOPES
from agentlightning.types import AttemptedRollout, NamedResources, Resource, RolloutMode, Span, Triplet
from agentlightning.types.data import GroupReward

T = TypeVar("T")
_METHODS = ("rollout", "training_rollout", "validation_rollout")

RolloutResult = float | int | None | list[Span] | list[Triplet]
"""A reward; None if rewards were emitted; spans, which become spans of the attempt; or triplets, trained as given."""


class LitAgent(Generic[T]):
    """Override `rollout` (it runs in a thread of its own) or `rollout_async` (it runs in the agents' event loop).

    `training_rollout` and `validation_rollout`, and their `_async` forms, may be overridden where the two differ.
    """

    trained_agents: str | None = None
    """A regular expression: only calls of agents in whose name it finds a match are trained. None trains all."""

    environment: Mapping[str, Any] | None = None
    """For an environment's agent: the arguments of `load_environment`, as `spec`, `agent` and `options`."""

    group_reward: GroupReward | None = None
    """Rewards the training rollouts of a task together, when all of them have finished: a function or a method of a
    list of `Sibling`s that returns one reward for each. Its rewards replace those that the rollouts gave themselves."""

    @explained
    def __init__(self, *, trained_agents: str | None = None, group_reward: GroupReward | None = None) -> None:
        try:
            re.compile(trained_agents or "")
        except re.error as error:
            raise ConfigError(f"trained_agents is no regular expression: {error}. Escape the character.") from None
        if trained_agents is not None:
            self.trained_agents = trained_agents
        if group_reward is not None:
            if not callable(group_reward):
                raise ConfigError(f"group_reward is {group_reward!r:.60}; give a function of a list of siblings.")
            self.group_reward = group_reward

    no_reward: ClassVar[str] = (
        "The agent returned None and emitted no reward. Return a number from the agent, "
        "or call agentlightning.emit_reward(...) before it ends."
    )
    """What is said of an attempt that ended without a reward."""

    @property
    def shared_state(self) -> str | None:
        """Why an attempt may find in its working folder what earlier ones left, and what to do about it; None where
        each has a folder of its own, or no folder."""
        return None

    @property
    def key_scopes(self) -> Sequence[str]:
        """What the API key of an attempt opens for this agent; see `agentlightning.keys`."""
        return ALL_SCOPES

    def check_task(self, task: T) -> None:
        """Raises ConfigError for a task that this agent cannot be given; asked of each task before a run begins."""

    def check_machine(self) -> None:
        """Raises ConfigError for what a rollout needs and this machine lacks; asked where rollouts run, before a run
        begins."""

    def check_resources(self, resources: NamedResources) -> None:
        """Raises ConfigError where something is missing that this agent needs; asked before a run begins."""

    def unused_prompts(self, resources: NamedResources) -> Sequence[str]:
        """The prompts among these resources that the agent is known not to take."""
        return ()

    @property
    def origin(self) -> tuple[str, str | None]:
        """Its name, and the file it is from (None where that is not known): `file.py:name` finds it again. A run
        without an agent, such as one that learns examples, has this very class, and no name to show."""
        return "" if type(self) is LitAgent else type(self).__name__, None

    def rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> RolloutResult:
        """Do one task and return its reward; None where rewards were emitted."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither rollout nor rollout_async.")

    async def rollout_async(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> RolloutResult:
        """The same, as a coroutine."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither rollout nor rollout_async.")

    def training_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> RolloutResult:
        """Called in training."""
        return self.rollout(task, resources, rollout)

    async def training_rollout_async(
        self, task: T, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutResult:
        """Called in training where one of the `_async` methods was overridden."""
        return await self.rollout_async(task, resources, rollout)

    def validation_rollout(self, task: T, resources: NamedResources, rollout: AttemptedRollout) -> RolloutResult:
        """Called in validation and tests."""
        return self.rollout(task, resources, rollout)

    async def validation_rollout_async(
        self, task: T, resources: NamedResources, rollout: AttemptedRollout
    ) -> RolloutResult:
        """Called in validation and tests where one of the `_async` methods was overridden."""
        return await self.rollout_async(task, resources, rollout)

    def is_async(self) -> bool:
        """Whether one of the `_async` methods was overridden."""
        return any(_overridden(type(self), f"{name}_async") for name in _METHODS)

    def own_methods(self) -> list[Callable[..., Any]]:
        """Of the methods that run a rollout, those that were overridden."""
        names = [*_METHODS, *(f"{name}_async" for name in _METHODS)]
        return [getattr(self, name) for name in names if _overridden(type(self), name)]

    def method_for(self, mode: RolloutMode | None) -> Any:
        """The method that runs a rollout of this mode: the training one for mode train, for all others the other."""
        kind = "training_rollout" if mode is RolloutMode.TRAIN else "validation_rollout"
        return _by_name(getattr(self, f"{kind}_async" if self.is_async() else kind))


def _by_name(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method as it is called here. One written as (task, rollout_id, resources) is recognised by these names."""
    names = list(inspect.signature(method).parameters)
    if names[1:3] != ["rollout_id", "resources"]:
        return method
    return lambda task, resources, rollout: method(task, rollout.rollout_id, resources)


def _overridden(cls: type, name: str) -> bool:
    return inspect.getattr_static(cls, name) is not inspect.getattr_static(LitAgent, name)


_SAME = {"llm": "main_llm", "main_llm": "llm"}


class GivenResources(dict[str, Resource]):
    """A dictionary whose errors name the resources that are there. Class-based agents of older scripts read
    `resources["main_llm"]`, newer ones `resources["llm"]`: both names mean the one endpoint that is there.
    """

    def __missing__(self, name: str) -> Resource:
        other = _SAME.get(name, "")
        if dict.__contains__(self, other):
            return self[other]
        there = ", ".join(repr(known) for known in self) or "none"
        raise UnknownResourceError(
            f"There is no resource {name!r}; there are: {there}. Use one of these names, or give the resource with "
            f"Trainer(initial_resources={{{name!r}: …}})."
        )

    def __contains__(self, name: object) -> bool:
        return dict.__contains__(self, name) or dict.__contains__(self, _SAME.get(str(name), ""))

    def get(self, name: str, default: Any = None) -> Any:
        """The resource of this name, or `default`."""
        try:
            return self[name]
        except UnknownResourceError:
            return default
