"""What of an agent's calls is trained, how they are sampled in training, and how far they may go: users' settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, Gt, Le
from pydantic import NonNegativeInt, PositiveInt

from agentlightning.arguments import Needs, SettingsGroup


def _filters(settings: Any) -> bool:
    drawn = settings.top_p < 1 or settings.top_k > 0 or settings.min_p > 0
    return drawn and settings.backend != "vllm" and not settings.is_supervised


_FILTERED = Needs(
    _filters,
    "top_p, top_k or min_p, an engine that says what they kept (vLLM does not), and an algorithm that learns from "
    "rewards",
)


@dataclass(frozen=True, kw_only=True)
class CallSettings(SettingsGroup):
    """Which calls train, how they are sampled, and how far they may go: `calls=agl.CallSettings(max_calls=8)`."""

    temperature: Annotated[float, Gt(0), Le(10)] = 1.0
    """Temperature of training rollouts; overrides what the agent requests."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """For training rollouts: sample only from the most probable tokens that together reach this probability."""
    top_k: NonNegativeInt = 0
    """For training rollouts: sample only from this many of the most probable tokens (0: all)."""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """For training rollouts: sample only from tokens with at least this share of the top token's probability."""
    val_temperature: Annotated[float | None, Ge(0), Le(10)] = None
    """Temperature of validation rollouts. None: what the agent requests."""
    filter_replay: Annotated[bool, _FILTERED] = False
    """Record which tokens `top_p`, `top_k` and `min_p` keep, and compute the learner's log-probs over the same
    tokens."""
    train_agents: str | None = None
    """A regular expression: train only calls of agents whose name matches it. None: all."""
    train_prompts: str | None = None
    """The same for the system prompt of a call."""
    max_calls: PositiveInt | None = None
    """Maximum number of model calls in a rollout; a rollout that exceeds it is truncated."""
    max_tokens: PositiveInt | None = None
    """Maximum number of sampled tokens in a rollout, over all its calls."""
    cut_long_prompts: bool = False
    """Shorten prompts that do not fit `max_context` (tool results first, oldest first) instead of refusing them."""
    strict_requests: bool = False
    """Refuse requests with fields or tools that have no effect here, by name, instead of answering without them."""
    renderer: str | None = None
    """How messages become tokens, if it cannot be detected; see the gateway's documentation."""
