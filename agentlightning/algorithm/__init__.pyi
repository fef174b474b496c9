"""The names of `agentlightning.algorithm`, and where each is loaded from when it is used."""

from agentlightning.algorithm.apo import APO as APO
from agentlightning.algorithm.base import (
    Algorithm as Algorithm,
    PolicySpec as PolicySpec,
    TrainingContext as TrainingContext,
    algo as algo,
)
from agentlightning.algorithm.baseline import Baseline as Baseline, dry_run_of as dry_run_of
from agentlightning.algorithm.credit.advantage import Estimator as Estimator, estimator as estimator
from agentlightning.algorithm.episode import collect as collect
from agentlightning.algorithm.family import (
    CISPO as CISPO,
    DAPO as DAPO,
    GSPO as GSPO,
    PPO as PPO,
    REINFORCE as REINFORCE,
    RLOO as RLOO,
    Distill as Distill,
    DrGRPO as DrGRPO,
    ReinforcePP as ReinforcePP,
    ReinforcePPBaseline as ReinforcePPBaseline,
    SelfDistill as SelfDistill,
)
from agentlightning.algorithm.gepa import GEPA as GEPA
from agentlightning.algorithm.groups import (
    Adam as Adam,
    Checkpoints as Checkpoints,
    Diagnostics as Diagnostics,
    Rewards as Rewards,
    Validation as Validation,
)
from agentlightning.algorithm.grpo import GRPO as GRPO
from agentlightning.algorithm.joint import Joint as Joint
from agentlightning.algorithm.part import Part as Part, PolicyHooks as PolicyHooks, RunHooks as RunHooks
from agentlightning.algorithm.parts.branches import Branches as Branches
from agentlightning.algorithm.parts.constraint import Constraint as Constraint
from agentlightning.algorithm.parts.correction import Correction as Correction
from agentlightning.algorithm.parts.critic import Critic as Critic
from agentlightning.algorithm.parts.explore import Explore as Explore
from agentlightning.algorithm.parts.group_judge import GroupJudge as GroupJudge
from agentlightning.algorithm.parts.league import League as League
from agentlightning.algorithm.parts.moving_baseline import MovingBaseline as MovingBaseline
from agentlightning.algorithm.parts.overlong import Overlong as Overlong
from agentlightning.algorithm.parts.preflight import Checks as Checks
from agentlightning.algorithm.parts.reference import Reference as Reference
from agentlightning.algorithm.parts.replay import Replay as Replay
from agentlightning.algorithm.parts.teacher import Teacher as Teacher
from agentlightning.algorithm.prompts import Prices as Prices
from agentlightning.algorithm.sampling.schedule import Mixture as Mixture
from agentlightning.algorithm.stall import StallRule as StallRule
from agentlightning.algorithm.supervised import DPO as DPO, SFT as SFT
from agentlightning.backend import ComputeSettings as ComputeSettings
from agentlightning.gateway.settings import CallSettings as CallSettings
from agentlightning.learner.catalog import LossSpec as LossSpec

__all__: list[str]
