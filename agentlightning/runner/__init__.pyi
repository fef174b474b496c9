"""The names of `agentlightning.runner`, and where each is loaded from when it is used."""

from agentlightning.runner.runner import (
    LitAgentRunner as LitAgentRunner,
    LitAgentRunner as Runner,  # noqa: F401 (its older name)
    ModelAccess as ModelAccess,
)

__all__: list[str]
