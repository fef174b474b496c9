"""What computes gradients: the verbs of a learner, and the packing of what it learns from. Knows nothing of torch."""

from agentlightning.learner.base import LossConfig, OptimParams
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget

__all__ = ["CreditedCall", "LossConfig", "OptimParams", "pack", "split_by_budget"]
