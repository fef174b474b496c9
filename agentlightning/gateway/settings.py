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
    """Of training rollouts, whatever the agent asks for: at temperature 0 siblings would all be the same."""
    top_p: Annotated[float, Gt(0), Le(1)] = 1.0
    """Of training rollouts, too: draw from the most probable tokens that together reach this probability …"""
    top_k: NonNegativeInt = 0
    """… from so many of them (0: all) …"""
    min_p: Annotated[float, Ge(0), Le(1)] = 0.0
    """… and from those that have at least this share of the most probable one's."""
    val_temperature: Annotated[float | None, Ge(0), Le(10)] = None
    """Of validation rollouts, whatever the agent asks for; None: what it asks for."""
    filter_replay: Annotated[bool, _FILTERED] = False
    """Write down which tokens these three left to draw from, and take the learner's log-probs over the same ones."""
    train_agents: str | None = None
    """A regular expression: only calls of agents whose name it finds something in are trained; None: all."""
    train_prompts: str | None = None
    """The same for the system prompt of a call."""
    max_calls: PositiveInt | None = None
    """Model calls that one rollout may make; one that wants more is truncated."""
    max_tokens: PositiveInt | None = None
    """Tokens that one rollout may have sampled, over all its calls."""
    cut_long_prompts: bool = False
    """Shorten prompts that do not fit `max_context` (tool results first, oldest first) instead of refusing them."""
    strict_requests: bool = False
    """Refuse requests with fields or tools that have no effect here, by name, instead of answering without them."""
    renderer: str | None = None
    """How messages become tokens, where it cannot be found out; see the gateway's documentation."""
