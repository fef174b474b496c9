"""What models' names mean besides the policy itself, which of its calls are trained, and how many are allowed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.arguments import explained_class
from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError
from agentlightning.gateway.routing.upstream import Provider
from agentlightning.rendering import Rendering


@explained_class
@dataclass(frozen=True)
class Frozen:
    """An engine whose calls are recorded with their tokens and never trained: a judge, an opponent, a teacher."""

    engine: Engine
    rendering: Rendering


@explained_class
@dataclass(frozen=True)
class Trained:
    """One more engine whose calls are trained: another policy of the same run."""

    engine: Engine
    rendering: Rendering


@dataclass(frozen=True)
class Selection:
    """Which calls of the policy are trained: those that all given patterns find something in."""

    agents: re.Pattern[str] | None = None
    """In the calling agent's name."""
    prompts: re.Pattern[str] | None = None
    """In the text of the request's system prompt."""

    @classmethod
    def of(cls, agents: str | None, prompts: str | None) -> Selection:
        return cls(_pattern("train_agents", agents), _pattern("train_prompts", prompts))

    def includes(self, agent: str | None, messages: Sequence[Mapping[str, Any]]) -> bool:
        if self.agents is not None and (agent is None or not self.agents.search(agent)):
            return False
        if self.prompts is None:
            return True
        system = "\n".join(m["content"] for m in messages if m["role"] in ("system", "developer"))
        return self.prompts.search(system) is not None


def _pattern(name: str, text: str | None) -> re.Pattern[str] | None:
    try:
        return None if text is None else re.compile(text)
    except re.error as error:
        raise ConfigError(f"{name} is not a regular expression: {error}.") from error


@dataclass(frozen=True)
class AttemptLimits:
    """How much one attempt may ask of the policy; None is no limit. An attempt that runs into one is truncated."""

    calls: int | None = None
    """Requests."""
    tokens: int | None = None
    """Tokens sampled. The response that crosses it is cut off there."""

    def __post_init__(self) -> None:
        for name, value in (("max_calls", self.calls), ("max_tokens", self.tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}.")


Model = Provider | Frozen | Trained | str
"""Another provider, a frozen engine, another policy, or another name for a model that exists."""


def check_models(models: Mapping[str, Model], policy: str | None) -> dict[str, Model]:
    """The models, if every name means one thing; else a `ConfigError` that says which does not."""
    for alias, model in models.items():
        if alias == policy:
            raise ConfigError(f"'{alias}' is the policy's own name; give the other model another one.")
        if (
            isinstance(model, str)
            and model != policy
            and not isinstance(models.get(model), Provider | Frozen | Trained)
        ):
            others = [name for name, other in models.items() if not isinstance(other, str)]
            known = ", ".join([*([policy] if policy else []), *others])
            raise ConfigError(f"The model '{alias}' is to mean '{model}', which does not exist. There are: {known}.")
    return dict(models)
