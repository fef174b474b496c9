"""AdamW's settings, besides the learning rate (Loshchilov and Hutter, arXiv 1711.05101)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge, Le
from pydantic import NonNegativeFloat

from agentlightning.algorithm.records import Record


@dataclass(frozen=True, kw_only=True)
class Adam(Record):
    """How AdamW steps: `GRPO(…, adam=agl.Adam(weight_decay=0.01))`."""

    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    beta1: Annotated[float, Ge(0), Le(0.9999)] = 0.9
    """AdamW's decay of the mean of gradients …"""
    beta2: Annotated[float, Ge(0), Le(0.999999)] = 0.999
    """… and of their squares."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm; 0 turns it off."""
