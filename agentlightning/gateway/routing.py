"""What the names of models can mean, besides the policy itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentlightning.engine.base import Engine
from agentlightning.errors import ConfigError
from agentlightning.gateway.rendering import Rendering
from agentlightning.gateway.upstream import Provider


@dataclass(frozen=True)
class Frozen:
    """An engine whose calls are recorded with their tokens and never trained: a judge, an opponent, a teacher."""

    engine: Engine
    rendering: Rendering


Model = Provider | Frozen | str
"""Another provider, a frozen engine, or another name for a model that exists."""


def check_models(models: Mapping[str, Model], policy: str) -> dict[str, Model]:
    """The models, if every name means one thing; else a `ConfigError` that says which does not."""
    for alias, model in models.items():
        if alias == policy:
            raise ConfigError(f"'{alias}' is the policy's own name; give the other model another one.")
        if isinstance(model, str) and model != policy and not isinstance(models.get(model), Provider | Frozen):
            known = ", ".join([policy, *(name for name, other in models.items() if not isinstance(other, str))])
            raise ConfigError(f"The model '{alias}' is to mean '{model}', which does not exist. There are: {known}.")
    return dict(models)
