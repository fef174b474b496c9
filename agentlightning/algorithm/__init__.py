"""Algorithms decide what to run and what to learn from it."""

from agentlightning.algorithm.advantage import Estimator, estimator
from agentlightning.algorithm.apo import APO
from agentlightning.algorithm.base import Algorithm, PolicySpec, TrainingContext
from agentlightning.algorithm.baseline import Baseline
from agentlightning.algorithm.decorator import algo
from agentlightning.algorithm.family import (
    CISPO,
    DAPO,
    GSPO,
    PPO,
    REINFORCE,
    RLOO,
    Distill,
    DrGRPO,
    ReinforcePP,
    ReinforcePPBaseline,
    SelfDistill,
)
from agentlightning.algorithm.gepa import GEPA
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.joint import Joint
from agentlightning.algorithm.league import League
from agentlightning.algorithm.mixture import Mixture
from agentlightning.algorithm.part import Part, PolicyHooks, RunHooks
from agentlightning.algorithm.prompts import Prices
from agentlightning.algorithm.supervised import DPO, SFT
from agentlightning.learner.catalog import LossSpec

__all__ = [
    "APO",
    "CISPO",
    "DAPO",
    "DPO",
    "GEPA",
    "GRPO",
    "GSPO",
    "PPO",
    "REINFORCE",
    "RLOO",
    "SFT",
    "Algorithm",
    "Baseline",
    "Distill",
    "DrGRPO",
    "Estimator",
    "Joint",
    "League",
    "LossSpec",
    "Mixture",
    "Part",
    "PolicyHooks",
    "PolicySpec",
    "Prices",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "RunHooks",
    "SelfDistill",
    "TrainingContext",
    "algo",
    "estimator",
]
