"""AIR, automatic intermediate rewards: what became of a tool call rewards the model call that made it.

    @air.on_tool_success
    def good(tool_name, output):
        return 0.1

Rules are asked when an attempt has ended and its calls are in the store. Their rewards name the response they are for:
algorithms with credit per call (`GRPO(credit="return_to_go")`) give them to that call. None is the final reward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from agentlightning.adapter.tools import ToolOutcome, tool_outcomes
from agentlightning.arguments import explained_class
from agentlightning.errors import AgentError
from agentlightning.types import Span
from agentlightning.types.names import ANNOTATION, REWARD_RESPONSE
from agentlightning.types.reward import reward_attributes

logger = logging.getLogger(__name__)

Rule = Callable[..., Any]
F = TypeVar("F", bound=Callable[..., Any])
RULE = "agentlightning.reward.rule"
"""Attribute: the name of the rule that gave the reward."""


@explained_class
class Air:
    """A set of rules. `agentlightning.air` is the one that runners ask unless they are given another."""

    def __init__(self) -> None:
        self.enabled = True
        self._success: list[Rule] = []
        self._failure: list[Rule] = []
        self._spans: list[tuple[Callable[[Span], bool], Rule]] = []

    def on_tool_success(self, rule: F) -> F:
        """`rule(tool_name, output)` returns the reward of a tool call that worked, or None for none."""
        self._success.append(rule)
        return rule

    def on_tool_failure(self, rule: F) -> F:
        """`rule(tool_name, error)` returns the reward of a tool call that failed, or None for none."""
        self._failure.append(rule)
        return rule

    def on_span(self, predicate: Callable[[Span], bool]) -> Callable[[F], F]:
        """`rule(span)` returns the reward for a span that the predicate takes; it is for the model call before it."""

        def register(rule: F) -> F:
            self._spans.append((predicate, rule))
            return rule

        return register

    def clear(self) -> None:
        """Forget all rules."""
        self._success.clear()
        self._failure.clear()
        self._spans.clear()

    def __bool__(self) -> bool:
        """Whether there is anything to ask."""
        return self.enabled and bool(self._success or self._failure or self._spans)

    def rewards(self, spans: Sequence[Span], rollout_id: str, attempt_id: str) -> list[Span]:
        """The reward spans that the rules give for an attempt's spans. A rule that fails is logged and gives none."""
        found: list[Span] = []
        for outcome in tool_outcomes(spans):
            rules, value = (self._failure, outcome.error) if outcome.error else (self._success, outcome.output)
            for rule in rules:
                reward = _ask(rule, outcome.name, value)
                found += _span(reward, rule, outcome.response_id, rollout_id, attempt_id)
        for predicate, rule in self._spans:
            for span in spans:
                if _ask(predicate, span):
                    response = _call_before(spans, span)
                    found += _span(_ask(rule, span), rule, response, rollout_id, attempt_id)
        return found


air = Air()
"""The rules of this process."""


def _ask(rule: Rule, *arguments: Any) -> Any:
    try:
        return rule(*arguments)
    except Exception:  # a rule is the user's code; the attempt is over and stays as it is
        logger.exception("The rule %s failed", getattr(rule, "__name__", rule))
        return None


def _span(value: Any, rule: Rule, response_id: str | None, rollout_id: str, attempt_id: str) -> list[Span]:
    if value is None:
        return []
    try:
        attributes = reward_attributes(value)
    except AgentError as error:
        logger.error("The rule %s gave no reward: %s", getattr(rule, "__name__", rule), error)
        return []
    attributes[RULE] = getattr(rule, "__name__", "rule")
    # A reward that names no call would count as the rollout's own.
    attributes[REWARD_RESPONSE] = response_id or "none"
    return [Span.from_attributes(name=ANNOTATION, attributes=attributes, rollout_id=rollout_id, attempt_id=attempt_id)]


def _call_before(spans: Sequence[Span], span: Span) -> str | None:
    calls = [s for s in spans if "gen_ai.response.id" in s.attributes and s is not span]
    before = [s for s in calls if (s.end_time or 0.0) <= (span.start_time or 0.0) + 1e-6]
    if "gen_ai.response.id" in span.attributes:
        return span.attributes["gen_ai.response.id"]
    last = max(before, key=lambda s: s.end_time or 0.0, default=None)
    return None if last is None else last.attributes["gen_ai.response.id"]


__all__ = ["Air", "ToolOutcome", "air"]
