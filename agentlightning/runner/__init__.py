"""Runners claim rollouts from the store, execute the agent, and report what happened."""

from agentlightning.runner.runner import LitAgentRunner, ModelAccess

Runner = LitAgentRunner
"""The older name of `LitAgentRunner`."""

__all__ = ["LitAgentRunner", "ModelAccess", "Runner"]
