"""Algorithms decide what to run and what to learn from it."""

from agentlightning.algorithm.base import Algorithm, PolicySpec, TrainingContext
from agentlightning.algorithm.baseline import Baseline
from agentlightning.algorithm.grpo import GRPO

__all__ = ["GRPO", "Algorithm", "Baseline", "PolicySpec", "TrainingContext"]
