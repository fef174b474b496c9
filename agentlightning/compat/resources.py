"""Methods that resources had."""

from __future__ import annotations

from agentlightning.types import LLM, AttemptedRollout, ProxyLLM


def with_attempted_rollout(self: ProxyLLM, rollout: AttemptedRollout) -> LLM:
    """The plain `LLM` of an attempt. Its key is the one of the resource, if it has one."""
    return self.for_attempt(rollout.rollout_id, rollout.attempt.attempt_id, self.api_key)
