"""Agents: a decorated function or a class, and what they may return."""

from agentlightning.litagent.decorator import FunctionAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.litagent import LitAgent, RolloutResult

__all__ = ["FunctionAgent", "LitAgent", "RolloutResult", "llm_rollout", "prompt_rollout", "rollout"]
