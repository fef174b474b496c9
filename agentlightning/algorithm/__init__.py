"""Algorithms decide what to run and what to learn from it."""

from agentlightning.algorithm.base import Algorithm, PolicySpec, TrainingContext
from agentlightning.algorithm.baseline import Baseline
from agentlightning.algorithm.family import (
    CISPO,
    DAPO,
    GSPO,
    PPO,
    REINFORCE,
    RLOO,
    DrGRPO,
    ReinforcePP,
    ReinforcePPBaseline,
)
from agentlightning.algorithm.grpo import GRPO

__all__ = [
    "CISPO",
    "DAPO",
    "GRPO",
    "GSPO",
    "PPO",
    "REINFORCE",
    "RLOO",
    "Algorithm",
    "Baseline",
    "DrGRPO",
    "PolicySpec",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "TrainingContext",
]
