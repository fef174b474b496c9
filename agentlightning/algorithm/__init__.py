"""Algorithms decide what to run and what to learn from it."""

from agentlightning.algorithm.adam import Adam
from agentlightning.algorithm.advantage import Estimator, estimator
from agentlightning.algorithm.apo import APO
from agentlightning.algorithm.base import Algorithm, PolicySpec, TrainingContext
from agentlightning.algorithm.baseline import Baseline
from agentlightning.algorithm.baselines import MovingBaseline
from agentlightning.algorithm.constraint import Constraint
from agentlightning.algorithm.correction import Correction
from agentlightning.algorithm.critic import Critic
from agentlightning.algorithm.decorator import algo
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
from agentlightning.algorithm.group_judge import GroupJudge
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.joint import Joint
from agentlightning.algorithm.league import League
from agentlightning.algorithm.mixture import Mixture
from agentlightning.algorithm.overlong import Overlong
from agentlightning.algorithm.part import Part, PolicyHooks, RunHooks
from agentlightning.algorithm.preflight import Checks
from agentlightning.algorithm.prompts import Prices
from agentlightning.algorithm.reference import Reference
from agentlightning.algorithm.replay import Replay
from agentlightning.algorithm.stall import StallRule
from agentlightning.algorithm.supervised import DPO, SFT
from agentlightning.algorithm.teacher import Teacher
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
    "Checks",
    "Constraint",
    "Correction",
    "Critic",
    "Distill",
    "DrGRPO",
    "Estimator",
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
    "RunHooks",
    "SelfDistill",
    "StallRule",
    "Teacher",
    "TrainingContext",
    "algo",
    "collect",
    "estimator",
]
