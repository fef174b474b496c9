"""Agents: a decorated function, a class or any program, and what they may return."""

from agentlightning.litagent.bubblewrap import Bubblewrap
from agentlightning.litagent.decorator import FunctionAgent, llm_rollout, prompt_rollout, rollout
from agentlightning.litagent.isolation import Container
from agentlightning.litagent.kubernetes import Kubernetes
from agentlightning.litagent.litagent import LitAgent, RolloutResult
from agentlightning.litagent.process import Limits
from agentlightning.litagent.program import Program, ProgramRun

__all__ = [
    "Bubblewrap",
    "Container",
    "FunctionAgent",
    "Kubernetes",
    "Limits",
    "LitAgent",
    "Program",
    "ProgramRun",
    "RolloutResult",
    "llm_rollout",
    "prompt_rollout",
    "rollout",
]
