"""Algorithms decide what to run and what to learn from it."""

from agentlightning.algorithm.apo import APO
from agentlightning.algorithm.base import Algorithm, PolicySpec, TrainingContext, algo
from agentlightning.algorithm.baseline import Baseline
from agentlightning.algorithm.credit.advantage import Estimator, estimator
from agentlightning.algorithm.episode import collect
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
from agentlightning.algorithm.groups import Adam, Checkpoints, Diagnostics, Rewards, Validation
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.joint import Joint
from agentlightning.algorithm.part import Part, PolicyHooks, RunHooks
from agentlightning.algorithm.parts.branches import Branches
from agentlightning.algorithm.parts.constraint import Constraint
from agentlightning.algorithm.parts.correction import Correction
from agentlightning.algorithm.parts.critic import Critic
from agentlightning.algorithm.parts.explore import Explore
from agentlightning.algorithm.parts.group_judge import GroupJudge
from agentlightning.algorithm.parts.league import League
from agentlightning.algorithm.parts.moving_baseline import MovingBaseline
from agentlightning.algorithm.parts.overlong import Overlong
from agentlightning.algorithm.parts.preflight import Checks
from agentlightning.algorithm.parts.reference import Reference
from agentlightning.algorithm.parts.replay import Replay
from agentlightning.algorithm.parts.teacher import Teacher
from agentlightning.algorithm.prompts import Prices
from agentlightning.algorithm.sampling.schedule import Mixture
from agentlightning.algorithm.stall import StallRule
from agentlightning.algorithm.supervised import DPO, SFT
from agentlightning.backend import ComputeSettings
from agentlightning.gateway.settings import CallSettings
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
    "Adam",
    "Algorithm",
    "Baseline",
    "Branches",
    "CallSettings",
    "Checkpoints",
    "Checks",
    "ComputeSettings",
    "Constraint",
    "Correction",
    "Critic",
    "Diagnostics",
    "Distill",
    "DrGRPO",
    "Estimator",
    "Explore",
    "GroupJudge",
    "Joint",
    "League",
    "LossSpec",
    "Mixture",
    "MovingBaseline",
    "Overlong",
    "Part",
    "PolicyHooks",
    "PolicySpec",
    "Prices",
    "Reference",
    "ReinforcePP",
    "ReinforcePPBaseline",
    "Replay",
    "Rewards",
    "RunHooks",
    "SelfDistill",
    "StallRule",
    "Teacher",
    "TrainingContext",
    "Validation",
    "algo",
    "collect",
    "estimator",
]
