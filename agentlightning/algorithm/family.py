"""The family: each algorithm is GRPO's loop with the settings that its paper names. Everything else stays settable.

| algorithm | siblings are compared by | loss | paper |
|---|---|---|---|
| `GRPO` | (r − mean) / std | clipped surrogate per token | arXiv 2402.03300 |
| `REINFORCE` | nothing | log-prob × return | Williams 1992 |
| `RLOO` | r − mean of the others | log-prob × advantage | arXiv 2402.14740 |
| `ReinforcePP` | (r − mean) / std over the tokens of the step | clipped surrogate | arXiv 2501.03262 |
| `ReinforcePPBaseline` | r − group mean, then the same | clipped surrogate | arXiv 2501.03262 |
| `DrGRPO` | r − mean | clipped surrogate, constant length | arXiv 2503.20783 |
| `DAPO` | (r − mean) / std, groups that differ only | clip-higher, token mean | arXiv 2503.14476 |
| `GSPO` | (r − mean) / std | sequence ratios | arXiv 2507.18071 |
| `CISPO` | (r − mean) / std | clipped weights, all gradients | arXiv 2506.13585 |
| `Distill` | nothing: a teacher's log-probs instead of rewards | clipped surrogate per token | arXiv 2306.13649 |
| `SelfDistill` | nothing: its own log-probs, had it been told a hint | clipped surrogate per token | arXiv 2601.19897 |
| `PPO` | a critic, GAE over tokens | clipped surrogate | arXiv 1707.06347, 1506.02438 |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.credit.units import Normalization
from agentlightning.algorithm.grpo import GRPO
from agentlightning.algorithm.parts.critic import Critic
from agentlightning.algorithm.parts.reference import Reference
from agentlightning.algorithm.parts.teacher import Teacher
from agentlightning.algorithm.records import Nested, changed
from agentlightning.algorithm.settings import Advantage, Loss
from agentlightning.errors import ConfigError
from agentlightning.types import Dataset


@dataclass(frozen=True, kw_only=True)
class REINFORCE(GRPO):
    """Log-prob times return, without a baseline (Williams 1992)."""

    loss: Loss = "reinforce"
    advantage: Advantage = "reinforce"


@dataclass(frozen=True, kw_only=True)
class RLOO(GRPO):
    """REINFORCE over whole sequences with the mean of the other siblings as baseline (Ahmadian et al., arXiv
    2402.14740, eq. 8): log-probs are summed over a rollout.
    """

    loss: Loss = "reinforce"
    advantage: Advantage = "rloo"
    normalization: Normalization = "sum"


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(GRPO):
    """REINFORCE++: returns whitened over the step's tokens, KL in the reward (Hu et al., arXiv 2501.03262)."""

    advantage: Advantage = "reinforce++"
    kl: Nested[Reference, float] = Nested(Reference(where="reward"))
    clip_high: float | None = 0.2


@dataclass(frozen=True, kw_only=True)
class ReinforcePPBaseline(GRPO):
    """REINFORCE++ with the group's mean as baseline (Hu et al., arXiv 2501.03262)."""

    advantage: Advantage = "reinforce++baseline"
    clip_high: float | None = 0.2


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GRPO):
    """GRPO without its two biases: no division by the deviation, none by the length (Liu et al., arXiv 2503.20783)."""

    advantage: Advantage = "drgrpo"
    normalization: Normalization = "constant"
    clip_high: float | None = 0.2


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """Clip-higher, token mean, dynamic sampling, and with `overlong_tokens` soft punishment (arXiv 2503.14476)."""

    dynamic_sampling: int = 2


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """Ratios and clipping of whole sequences (Zheng et al., arXiv 2507.18071, with its clip range and minibatches)."""

    minibatches: int = 4
    loss: Loss = "gspo"
    normalization: Normalization = "sequence"


@dataclass(frozen=True, kw_only=True)
class CISPO(GRPO):
    """Clips importance weights and keeps every token's gradient (MiniMax-M1, arXiv 2506.13585)."""

    minibatches: int = 4
    """With one update per step no ratio would leave 1."""
    loss: Loss = "cispo"


@dataclass(frozen=True, kw_only=True)
class Distill(GRPO):
    """On-policy distillation: the policy samples, and learns to say what `teacher` would have said there.

        agl.Trainer(algorithm=agl.Distill(model="calc", teacher="runs/calc-…")).fit(agent, tasks)

    A token's advantage is log π_teacher − log π, so what is minimised is the reverse KL on the policy's own states
    (Agarwal et al., arXiv 2306.13649; Gu et al., arXiv 2306.08543). Every token teaches and rewards play no part: they
    are only reported, and the agent needs none.
    """

    credit: str = "teacher"
    group_size: int = 2
    minibatches: int = 4

    def check_data(self, train: Dataset[Any]) -> None:
        super().check_data(train)
        self.teacher.check_model()


@dataclass(frozen=True, kw_only=True)
class SelfDistill(Distill):
    """Self-distillation: the policy learns to say what it would have said, had it been told the task's hint.

        agl.SelfDistill(model="…", hint="demonstration")  # tasks: {"question": …, "demonstration": …}

    A token's advantage is log π_0(token | hint, context) − log π(token | context): on-policy, without a reward (SDFT,
    Shenfeld et al., arXiv 2601.19897). π_0 is the model as it came; with `reference_every=1, reference_share=0.01` it
    follows the policy, as in the paper. The agent does not see the hint.
    """

    teacher: Nested[Teacher, str] = Nested(Teacher(hint="hint"))

    def __post_init__(self) -> None:
        if self.teacher.url is not None:
            raise ConfigError("SelfDistill's teacher is the model itself, loaded here: leave teacher_url out.")
        self._derive(teacher=changed(self.teacher, model=self.teacher.model or str(self.model)))
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class PPO(GRPO):
    """PPO with a critic on the policy's hidden states and GAE over tokens (arXiv 1707.06347, 1506.02438); over turns
    with `credit="gae"`.
    """

    credit: str = "token_gae"
    critic: Nested[Critic, float] = Nested(Critic(lam=0.95))
    clip_high: float | None = 0.2
