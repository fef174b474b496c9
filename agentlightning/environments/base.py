"""The seam: what an environment is, and how one is loaded by its scheme."""

from __future__ import annotations

import inspect
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

from agentlightning.arguments import explained_class, nearest
from agentlightning.errors import ConfigError
from agentlightning.litagent import LitAgent

SCHEMES: Mapping[str, str] = MappingProxyType(
    {
        "gym": "agentlightning.environments.gym:GymEnvironment",
        "harbor": "agentlightning.environments.harbor:HarborEnvironment",
        "inspect": "agentlightning.environments.inspect:InspectEnvironment",
        "openenv": "agentlightning.environments.openenv:OpenEnvEnvironment",
        "verifiers": "agentlightning.environments.verifiers:VerifiersEnvironment",
    }
)
"""Where the environment of a scheme is: "module:class". The class is called with what stands behind the colon, with
`agent` where one is given, and with its options by name."""


@explained_class
@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One way of trying an environment out without a model, and what came of it."""

    task: str
    """Which task, in a few words."""
    by: str
    """What worked on it: "solution", "nothing", "random actions"."""
    reward: float | None
    """What it earned; None where that failed, or where it earns nothing."""
    expected: str
    """What it should be, in words: "1", "less than 1", "a number"."""
    good: bool
    """Whether it is as expected."""
    why: str = ""
    """What went wrong, where it failed."""
    seconds: float = 0.0


class Environment(ABC):
    """Tasks, and an agent that works on one of them and is rewarded there.

        env = agl.load_environment("gym:FrozenLake-v1", is_slippery=False)
        agl.Trainer(algorithm=agl.GRPO(model="./my-model")).fit(env.agent, env.tasks())

    Its options are the arguments of its `__init__`, and wrong ones raise ConfigError before anything runs.
    """

    summary: ClassVar[str]
    """What it is, in a line."""
    tested: ClassVar[str]
    """The newest version of its package or format that was run."""
    agent: LitAgent[Any]
    """What works on a task."""

    @abstractmethod
    def tasks(self) -> Sequence[Any]:
        """Its tasks, in an order that stays. Raises ConfigError where there are none."""

    def val_tasks(self) -> Sequence[Any]:
        """Tasks to validate on, none of which is in `tasks`; none if its settings name none."""
        return ()

    def check(self) -> None:  # noqa: B027 - most need nothing
        """Raises ConfigError where what it needs on this machine does not answer, before a model is loaded."""

    @abstractmethod
    def probes(self, tasks: Sequence[Any]) -> AsyncIterator[Probe]:
        """Try these tasks out without a model: whether they start, run, end, and reward what they should."""


def environment_again(known: Mapping[str, Any]) -> Environment:
    """The environment that `LitAgent.environment` says."""
    return load_environment(known["spec"], agent=known.get("agent"), **known.get("options", {}))


def _likely(spec: str) -> str:
    """What was probably meant by a name without one of our schemes."""
    scheme, colon, name = spec.partition(":")
    if colon and name:
        meant = next((one for one in SCHEMES if scheme.lower().startswith(one)), None) or nearest(scheme, SCHEMES)
        return f" Did you mean {meant}:{name}?" if meant else ""
    if re.search(r"-v\d+$", spec):
        return f" Did you mean gym:{spec}?"
    return f" Did you mean harbor:{spec}?" if Path(spec).is_dir() else ""


def load_environment(spec: str, *, agent: str | None = None, **options: Any) -> Environment:
    """The environment that is called `scheme:name`.

    Args:
        spec: For example "gym:FrozenLake-v1" or "harbor:./tasks"; `agl env list` lists the schemes.
        agent: For environments that leave the work to an agent: the name of a known one (`agl agents`) or a command.
        options: Settings of the environment, by name.

    Raises ConfigError for a scheme or an option that there is not, and for a name that it does not know.
    """
    scheme, colon, name = spec.partition(":")
    if scheme not in SCHEMES or not colon:
        if scheme == "hf":
            raise ConfigError(f"{spec} brings tasks and nothing that works on them: --tasks {spec}, and an --agent.")
        known = ", ".join(f"{one}:…" for one in SCHEMES)
        raise ConfigError(f"{spec!r} names no environment.{_likely(spec)} There are {known} (agl env list).")
    if not name:
        raise ConfigError(f"{spec!r} says no environment behind the colon, as in {scheme}:NAME.")
    kind = environment_class(scheme)
    parameters = inspect.signature(kind).parameters
    if agent is not None and "agent" not in parameters:
        raise ConfigError(f"{scheme}: has an agent of its own: leave out the agent ({agent!r}).")
    taken = {n for n, p in parameters.items() if p.kind is p.KEYWORD_ONLY} - {"agent"}
    others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option not in taken and not others:
            raise ConfigError(f"{scheme}: has no option {option!r}. It has {', '.join(sorted(taken))}.")
    made = kind(name, **({"agent": agent} if agent is not None else {}), **options)
    made.agent.environment = {"spec": spec, "agent": agent, "options": options}
    return made


def environment_class(scheme: str) -> type[Any]:
    """The class of a scheme."""
    module, _, name = SCHEMES[scheme].partition(":")
    return getattr(import_module(module), name)
