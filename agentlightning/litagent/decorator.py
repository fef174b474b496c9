"""`@rollout`: an ordinary function becomes an agent and stays callable."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, overload

from agentlightning.arguments import explained
from agentlightning.errors import ConfigError
from agentlightning.litagent.litagent import GivenResources, LitAgent, RolloutResult
from agentlightning.types import LLM, AttemptedRollout, NamedResources, PromptTemplate, ProxyLLM, Resource
from agentlightning.types.data import GroupReward

Function = Callable[..., Any]

_BY_TYPE: dict[str, type[Resource]] = {"llm": LLM, "prompt_template": PromptTemplate}
_NO_RESOURCE = ("resources", "rollout")
_FILLED_BY_NAME = (*_BY_TYPE, *_NO_RESOURCE)


_OF_REWARD_FUNCTIONS = frozenset(
    {
        *("completions", "completion", "completion_ids", "prompts", "trainer_state"),
        *("data_source", "solution_str", "ground_truth", "extra_info"),
        *("state", "parser", "info", "response", "responses"),
    }
)
"""Parameters of reward functions of trl, verl and verifiers."""


class FunctionAgent(LitAgent[Any]):
    """An agent made from `f(task, …)`. Its other parameters are filled by name.

    `llm` is the first LLM of the resources, `prompt_template` the first template, `resources` all of them, `rollout`
    the rollout; any other name is looked up in the resources. A parameter with another default than None is left alone.
    """

    def __init__(
        self,
        function: Function,
        *,
        trained_agents: str | None = None,
        group_reward: GroupReward | None = None,
        strip_proxy: bool = True,
    ) -> None:
        super().__init__(trained_agents=trained_agents, group_reward=group_reward)
        self._strips = strip_proxy
        if isinstance(function, type):
            raise ConfigError(
                f"{function.__name__} is a class, and @agl.rollout is for a def. Make it an agl.LitAgent with a method "
                "rollout(self, task, resources, rollout), and give an object of it to fit."
            )
        if not callable(function):
            raise ConfigError(f"An agent is a function of a task, not {function!r:.60}: @agl.rollout is for a def.")
        self.function = function
        self._is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._wanted, self._optional = _parameters(function)
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The function itself, as it is called to try it. Raises TypeError where it is called to be given to `fit`."""
        if not args and not kwargs:
            try:
                inspect.signature(self.function).bind()
            except TypeError:
                name = _name(self.function)
                raise TypeError(
                    f"{name}() runs the agent, and was given no task. To train it, leave () out: fit({name}, tasks)."
                ) from None
        return self.function(*args, **kwargs)

    @property
    def origin(self) -> tuple[str, str | None]:
        code = inspect.unwrap(self.function)
        source = code.__code__.co_filename if inspect.isfunction(code) else None
        return _name(self.function), source

    def check_resources(self, resources: NamedResources) -> None:
        """Raises ConfigError for a parameter that no resource fits."""
        for name in self._wanted:
            if name not in _NO_RESOURCE:
                self._resource(name, GivenResources(resources))

    def unused_prompts(self, resources: NamedResources) -> Sequence[str]:
        """Those that no parameter is filled with; the gateway's own are no agent's to take."""
        filled = (*self._wanted, *self._optional)
        own = {n: r for n, r in resources.items() if isinstance(r, PromptTemplate) and not r.literal}
        if not own or "resources" in filled:
            return ()
        taken = [self._resource(name, resources) for name in filled if name in resources or name == "prompt_template"]
        return [name for name, resource in own.items() if not any(resource is each for each in taken)]

    def is_async(self) -> bool:
        return self._is_async

    def rollout(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> RolloutResult:
        return self.function(task, **self._arguments(resources, rollout))

    async def rollout_async(self, task: Any, resources: NamedResources, rollout: AttemptedRollout) -> RolloutResult:
        return await self.function(task, **self._arguments(resources, rollout))

    def _arguments(self, resources: NamedResources, rollout: AttemptedRollout) -> dict[str, Any]:
        special = {"rollout": rollout, "resources": resources}
        found = {name: special[name] if name in special else self._resource(name, resources) for name in self._wanted}
        for name in self._optional:
            with suppress(ConfigError):
                found[name] = special[name] if name in special else self._resource(name, resources)
        return {name: self._of_attempt(value, rollout) for name, value in found.items()}

    def _of_attempt(self, value: Any, rollout: AttemptedRollout) -> Any:
        """An endpoint that does not name its attempt yet, as one that does; runners bind endpoints before."""
        if not self._strips or not isinstance(value, ProxyLLM):
            return value
        return value.for_attempt(rollout.rollout_id, rollout.attempt.attempt_id, value.api_key)

    def _resource(self, name: str, resources: NamedResources) -> Resource:
        if name in resources:
            return resources[name]
        wanted = _BY_TYPE.get(name)
        for resource in resources.values():
            put_in = isinstance(resource, PromptTemplate) and resource.literal  # by the gateway: no agent's to fill in
            if wanted is not None and isinstance(resource, wanted) and not put_in:
                return resource
        if wanted is LLM:
            raise ConfigError(
                f"The agent {_name(self.function)} asks for an LLM and there is none. Give one: "
                "Trainer(models={'llm': agl.Provider(base_url=…, model=…)}), or --endpoint of agl run and agl "
                "optimize; or let it be served here: GRPO(model=…) trains it, Baseline(model=…) or agl run --model "
                "only runs the agent."
            )
        if name in _OF_REWARD_FUNCTIONS:
            raise ConfigError(
                f"The agent {_name(self.function)} has a parameter '{name}', as reward functions of other trainers "
                "have. Here the agent itself calls the model and returns the reward: def agent(task, llm), with "
                "OpenAI(base_url=llm.endpoint, api_key=llm.api_key) in it; call your function with its answer."
            )
        raise ConfigError(
            f"The agent {_name(self.function)} has a parameter '{name}', but the resources hold only: "
            f"{', '.join(resources) or 'nothing'}. Rename the parameter, give it a default value, or give the resource "
            f"with Trainer(initial_resources={{'{name}': …}})."
        )


def _name(function: Function) -> str:
    """Of a function; of an object that can be called, its class's."""
    return getattr(function, "__name__", type(function).__name__)


def _parameters(function: Function) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the parameters to be filled, and of those that are None unless they can be."""
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(f"The agent {_name(function)} has `yield`, so that it returns no reward. Write return there.")
    parameters = list(inspect.signature(function).parameters.values())
    if not parameters:
        raise ConfigError(f"The agent {_name(function)} takes no arguments; its first one must be the task.")
    name, first = _name(function), parameters[0].name
    if first == "self":
        raise ConfigError(
            f"The agent {name} is a method that belongs to no object: its 'self' would be given the task. Leave "
            f"@agl.rollout off and give fit the method of an object, fit(MyClass().{name}, tasks); or make the class a "
            "LitAgent."
        )
    if first in _FILLED_BY_NAME:
        raise ConfigError(
            f"The first parameter of the agent {name} is '{first}', and the first one is given the task, whatever its "
            f"name. Write def {name}(task, {first})."
        )
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    rest = [p for p in parameters[1:] if p.kind not in variable]
    return tuple(p.name for p in rest if p.default is p.empty), tuple(p.name for p in rest if p.default is None)


@overload
def rollout(function: Function) -> FunctionAgent: ...
@overload
def rollout(
    *, trained_agents: str | None = None, group_reward: GroupReward | None = None
) -> Callable[[Function], FunctionAgent]: ...
@explained
def rollout(
    function: Function | None = None, *, trained_agents: str | None = None, group_reward: GroupReward | None = None
) -> Any:
    """Make an agent from a function, sync or async, that does one task and returns its reward.

        @agl.rollout
        async def agent(task, llm):
            client = AsyncOpenAI(base_url=llm.endpoint, api_key=llm.api_key)
            ...  # model=llm.model
            return 1.0

    The first parameter is the task, as it is in the data set. Others are filled by name: `llm` is the model to talk to,
    `prompt_template` a prompt that is tuned, `rollout` the rollout itself, `resources` all there are. The agent returns
    a finite number, or None after `emit_reward`. The function stays callable.

    `trained_agents` is a regular expression: where an agent is made of several, only calls of those it names train.
    `group_reward` rewards the training rollouts of a task together: see `LitAgent.group_reward`.
    """
    made = functools.partial(FunctionAgent, trained_agents=trained_agents, group_reward=group_reward)
    return made if function is None else made(function)


@overload
def llm_rollout(function: Function) -> FunctionAgent: ...
@overload
def llm_rollout(*, strip_proxy: bool = True) -> Callable[[Function], FunctionAgent]: ...
@explained
def llm_rollout(function: Function | None = None, *, strip_proxy: bool = True) -> Any:
    """`rollout` for a function of `(task, llm)`; refuses one that has no `llm`.

    `strip_proxy=False` leaves a `ProxyLLM` as it is, for functions that ask it for `get_base_url(rollout_id,
    attempt_id)` themselves. Runners give every agent the endpoint of its attempt, whatever is said here.
    """
    if function is None:
        return functools.partial(_requiring, "llm", strip_proxy=strip_proxy)
    return _requiring("llm", function, strip_proxy=strip_proxy)


@explained
def prompt_rollout(function: Function) -> FunctionAgent:
    """`rollout` for a function of `(task, prompt_template)`; refuses one that has no `prompt_template`."""
    return _requiring("prompt_template", function)


def _requiring(name: str, function: Function, *, strip_proxy: bool = True) -> FunctionAgent:
    if name not in inspect.signature(function).parameters:
        raise ConfigError(f"The agent {_name(function)} has no parameter '{name}'.")
    return FunctionAgent(function, strip_proxy=strip_proxy)
