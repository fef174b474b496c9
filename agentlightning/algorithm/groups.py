"""Settings that belong together, and are no feature's: each is a record (see `records`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Ge, Le
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from agentlightning.algorithm.credit.units import OUTCOME_USE, Use
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.types import Outcome

RewardScale = Literal["none", "source"]
"""Whether rewards are divided by the deviation that those of their data set have had."""
_SCALE = Needs(
    lambda s: s.advantage not in ("grpo", "gdpo", "maxrl") or not s.credit_mode.compares,
    "an advantage that does not divide by the rewards' scale itself, such as drgrpo, rloo or reinforce++",
)


@dataclass(frozen=True, kw_only=True)
class Adam(SettingsGroup):
    """How AdamW steps: `GRPO(…, adam=agl.Adam(weight_decay=0.01))`."""

    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    beta1: Annotated[float, Ge(0), Le(0.9999)] = 0.9
    """AdamW's decay of the mean of gradients."""
    beta2: Annotated[float, Ge(0), Le(0.999999)] = 0.999
    """AdamW's decay of the mean of squared gradients."""
    max_grad_norm: NonNegativeFloat = 1.0
    """Gradients are clipped to this norm; 0 turns it off."""


@dataclass(frozen=True, kw_only=True)
class Rewards(SettingsGroup):
    """What of a reward trains: `GRPO(…, rewards=agl.Rewards(weights={"correct": 1.0, "short": 0.1}))`."""

    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights of a reward's parts by name: their weighted sum trains. Empty: the primary part alone."""
    watched: Sequence[str] = ()
    """Parts of a reward to monitor without training on them: the run warns if one falls while the reward rises."""
    scale: Annotated[RewardScale, _SCALE] = "none"
    """"source" divides the rewards of each data set of a `Mixture` by their standard deviation so far, so that all have
    the same scale."""
    outcomes: Mapping[Outcome, Use] = field(default_factory=lambda: dict(OUTCOME_USE))
    """How to use rollouts by outcome: "train" uses their reward, "zero" a reward of 0, "mask" leaves them out. Outcomes
    that are not given keep their default."""


@dataclass(frozen=True, kw_only=True)
class Validation(SettingsGroup):
    """When the model is validated: `GRPO(…, validation=agl.Validation(every=5, repeats=4))`."""

    every: NonNegativeInt = 10
    """Validate before the first step, each time after this many steps, and after the last. 0: never."""
    before: bool | None = None
    """Whether to validate before the first step. None: yes, if there is later validation."""
    repeats: PositiveInt = 1
    """Rollouts of each validation task: `val_reward` is their mean, `val_best@k` the reward of the best of k."""


@dataclass(frozen=True, kw_only=True)
class Checkpoints(SettingsGroup):
    """Which checkpoints are written and kept: `GRPO(…, checkpoints=agl.Checkpoints(every=5, keep=3))`."""

    every: PositiveInt = 10
    """Number of steps between checkpoints; there is also one after the last step."""
    keep: PositiveInt = 2
    """Number of last checkpoints to keep; the best one is kept, too."""
    copy: str | None = None
    """An fsspec URL, such as s3://bucket/run, gs://… or file:///shared/run. Each checkpoint is copied there, and
    `resume` can start from it on any machine."""


@dataclass(frozen=True, kw_only=True)
class Diagnostics(SettingsGroup):
    """How often a run checks its own numbers: `GRPO(…, diagnostics=agl.Diagnostics(noise_every=0))`."""

    packing_every: NonNegativeInt = 50
    """Steps between comparisons of a packed group with its separate rows; 0 turns them off."""
    noise_every: NonNegativeInt = 5
    """Steps between two measurements of the gradient's signal and noise, from two halves of its groups; 0 turns them
    off. Not with `ranks`."""
    max_logprob_gap: PositiveFloat | None = None
    """Stop if log-probs of learner and engine differ by more than this on fresh samples. None: 1e-3 in float32 (1e-2
    for models with gated delta nets, such as Qwen3-Next and Qwen3.5), else 0.5."""
