"""The settings of a training run: one flat set of names that every algorithm of the family shares.

An algorithm is a set of defaults for them (see `family.py`). What cannot work together is refused when it is made, and
a name that does not exist is a ConfigError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.credit.advantage import Compute, Estimator, as_estimator
from agentlightning.algorithm.credit.modes import CREDIT_MODES, CreditMode
from agentlightning.algorithm.credit.units import OUTCOME_USE, CreditRule, Normalization
from agentlightning.algorithm.groups import Adam, Checkpoints, Diagnostics, Rewards, Validation
from agentlightning.algorithm.hints import OF_TRAINING
from agentlightning.algorithm.records import (
    FLAT,
    FlatNames,
    Nested,
    changed,
    gathered,
    names_of,
    settings_of,
    take_defaults,
    value_of,
)
from agentlightning.algorithm.stall import StallRule
from agentlightning.arguments import GivenByName, Needs, can_be, one_of
from agentlightning.backend import BackendFactory, ComputeSettings, ModelSettings, check_backend
from agentlightning.errors import ConfigError
from agentlightning.gateway.settings import CallSettings
from agentlightning.learner.base import LossConfig
from agentlightning.learner.catalog import LOSSES, LossSpec, as_loss
from agentlightning.models.shape import LOGPROB_GAP, ModelShape, read_shape
from agentlightning.types import Dataset, RolloutConfig

Loss = str | Callable[..., Any] | LossSpec
"""A name in `learner.catalog.LOSSES`, an import path, a function that has one, or what a loss needs besides."""
Advantage = str | Compute | Estimator
"""A name in `credit.advantage.ADVANTAGES`, a function, or what an advantage needs besides."""
Curriculum = str | Callable[..., Any] | None
"""A name in `algorithm.parts.curriculum.CURRICULA`, or a function."""
FALLBACK_RATE = 1e-6
"""The learning rate for a model of which nothing is known: what is usual for the large ones."""

Share = Annotated[float, Gt(0), Le(1)]
_TURNS = Needs(lambda s: s.credit_mode.turns, f"credit={one_of(CREDIT_MODES, lambda m: m.turns)}")
_BROADCAST = Needs(
    lambda s: not s.credit_mode.turns,
    f"credit={one_of(CREDIT_MODES, lambda m: not m.turns)}, and the others add rewards up anyway",
)
_COMPARES = Needs(lambda s: s.credit_mode.compares, f"credit={one_of(CREDIT_MODES, lambda m: m.compares)}")
_GROUPS = Needs(
    lambda s: s.compares_siblings and s.credit == "broadcast" and not s.is_supervised,
    "credit='broadcast' and an advantage that compares siblings",
)
_CLIPS = Needs(
    lambda s: s.loss_spec.clips or s.loss_spec.own, f"a loss that clips: {one_of(LOSSES, lambda one: one.clips)}"
)
_UPDATES = Needs(
    lambda s: s.minibatches * s.update_epochs > 1 and s.ranks == 1,
    "several updates per step (minibatches or update_epochs) on one rank",
)


@dataclass(frozen=True, kw_only=True)
class TrainingSettings(GivenByName, FlatNames, ModelSettings, Algorithm):
    """What `GRPO` and every other algorithm of its family can be told. `model` alone is enough; the rest has defaults.

    A setting that does not exist, or that would have no effect, is a ConfigError when the algorithm is made.
    """

    _method_hints: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(
            ("fit", "train", "dev", "learn"), "Give it to a trainer: Trainer(algorithm=…).fit(agent, tasks)."
        ),
        **dict.fromkeys(
            ("load", "from_pretrained", "from_config", "from_yaml", "from_dict", "save", "save_pretrained"),
            "Settings are its arguments, and a model is named: GRPO(model='runs/NAME', steps=5).",
        ),
    }
    _others = OF_TRAINING
    _needed: ClassVar[Mapping[str, str]] = {
        "model": "a directory, a Hugging Face id such as 'Qwen/Qwen3-0.6B', or 'calc', which ships with the package"
    }

    backend: str | BackendFactory = "embedded"
    """Where the model is sampled and trained: "embedded" is a separate process, "inprocess" a thread of this process
    (for debugging), "vllm" vLLM servers and a learner process, "ray" processes on a Ray cluster; or a callable that
    makes your own backend from a `ModelSpec`."""
    compute: Nested[ComputeSettings, str] = Nested(ComputeSettings())
    """Where and how it is computed there."""
    calls: Nested[CallSettings, float] = Nested(CallSettings())
    """Which calls are trained, how they are sampled, and how far they may go."""
    group_size: PositiveInt = 8
    """Rollouts per task that are compared with each other."""
    tasks_per_step: PositiveInt = 16
    """A step samples tasks_per_step × group_size rollouts."""
    curriculum: Curriculum = None
    """How often each task is drawn, by its earlier rewards: a name, or your own function (records). None: every task
    once per epoch."""
    epochs: PositiveInt = 1
    """Passes over all tasks, unless `steps` is set."""
    steps: PositiveInt | None = None
    """Number of steps; None: as many as `epochs` need."""
    learning_rate: NonNegativeFloat | None = None
    """AdamW's learning rate. None: chosen by the model's size and kind, 20 times as much for an adapter, up to 3.4
    times for all weights of a small model; the run's first line shows it."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate changes; "linear" and "cosine" fall to zero at the end of the run."""
    warmup_steps: NonNegativeInt = 0
    """Number of first steps over which the learning rate rises to its full value."""
    minibatches: PositiveInt = 1
    """Updates per step; each uses an equal share of the step's rollouts, in whole groups."""
    update_epochs: PositiveInt = 1
    """Passes over a step's rollouts."""

    routing_replay: Annotated[bool, _UPDATES] = False
    """For a mixture of experts: in all updates of a step, route each token to the experts chosen before the first
    update."""

    loss: Loss = "ppo_clip"
    """A name, or your own function (entries, config), also by its import path."""
    clip_low: Annotated[NonNegativeFloat | None, Le(1), _CLIPS] = None
    """Lower clipping bound 1 − `clip_low` of a token's ratio (current probability over probability when sampled)."""
    clip_high: Annotated[NonNegativeFloat | None, _CLIPS] = None
    """Upper bound 1 + `clip_high`. Beyond the bounds a token has no gradient in the clipped losses. None: the loss's
    own bounds (`LossSpec.clip`), 0.2 and 0.28 for "ppo_clip"."""
    advantage: Annotated[Advantage, _COMPARES] = "grpo"
    """How returns are compared: a name, or your own function (returns_U, groups_U, counts_U)."""
    credit: str = "broadcast"
    """Which calls a reward goes to: broadcast, return_to_go, per_turn, gigpo, hierarchical, branches, gae or token_gae;
    or teacher, which is `Distill`."""
    gamma: Annotated[float, Ge(0), Le(1), _TURNS] = 1.0
    """Discount per turn (per token in `token_gae`)."""
    group_by: Annotated[Literal["task", "rollout"], _GROUPS] = "task"
    """What is compared: the rollouts of a task, or the calls of one rollout, each by the rewards that name it or else
    by the rollout's reward."""
    rollout_return: Annotated[Literal["final", "sum"], _BROADCAST] = "final"
    """What `broadcast` gives to all calls of a rollout with several rewards: the last one, or their sum."""
    normalization: Normalization = "token"
    """Whether every token, every sequence (conversation) or every rollout counts the same. With "sum" a token counts
    1 / rollouts, with "constant" 1 / (rollouts × max_context)."""
    entropy_coef: float = 0.0
    """Weight of a bonus for the entropy of what is sampled, in nats per token. 0: none."""
    dynamic_sampling: NonNegativeInt = 0
    """Maximum number of further sampling rounds in a step; each replaces groups with equal rewards by new tasks."""
    rewards: Nested[Rewards, Mapping[str, float]] = Nested(Rewards())
    """Which parts of a reward train, and what rollouts that did not end well are worth."""

    max_staleness: NonNegativeInt = 0
    """Maximum number of steps that sampling runs ahead of learning. 0: each step is sampled with the current
    weights."""
    quorum: Share = 1.0
    """Share of a step's groups that learning waits for. The slower groups move to the next step, which takes fewer
    tasks in exchange."""

    adam: Nested[Adam, None] = Nested(Adam())
    """The optimiser's settings, besides the learning rate."""
    max_kl: PositiveFloat | None = 0.05
    """Limit of one update's mean KL(new ‖ old) per token, in nats; a larger update is halved. None: no limit."""
    tokens_per_batch: PositiveInt = 16_384
    """Unique tokens in one forward and backward pass; bounds the learner's memory."""
    diagnostics: Nested[Diagnostics, int] = Nested(Diagnostics())
    """How often a run checks its own numbers."""
    rollout_config: RolloutConfig = field(default_factory=RolloutConfig)
    """Deadline and retries of each rollout."""
    validation: Nested[Validation, int] = Nested(Validation())
    """When the model is validated."""
    checkpoints: Nested[Checkpoints, int] = Nested(Checkpoints())
    """Which checkpoints are written and kept."""
    stall: Nested[StallRule, float] = Nested(StallRule())
    """When a step is stalled, and what becomes of it."""
    deterministic: bool = False
    """Run one rollout at a time, seeded by step, so that a repeated or resumed run ends with the same weights. Slow."""
    seed: NonNegativeInt = 0
    """Decides the order of the tasks, and seeds the sampling."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        take_defaults(cls)

    @classmethod
    def _known(cls, names: Sequence[str]) -> Sequence[str]:
        return (*names, *(flat for flat in names_of(cls) if flat not in names))

    @classmethod
    def _as_fields(cls, given: Mapping[str, Any]) -> Mapping[str, Any]:
        return gathered(cls, given)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            record, own = FLAT.get(name, ("", ""))
            return getattr(vars(self)[record], own) if record in vars(self) else super().__getattr__(name)

    def __post_init__(self) -> None:
        _ = self.adapters  # are they names?
        check_backend(self.backend, self.backend_options)
        if isinstance(self.rewards.outcomes, Mapping):
            self._derive(rewards=changed(self.rewards, outcomes={**OUTCOME_USE, **self.rewards.outcomes}))
        if isinstance(self.rewards.watched, list):  # as a file of settings has them
            self._derive(rewards=changed(self.rewards, watched=tuple(self.rewards.watched)))

    def _derive(self, **settings: Any) -> None:
        """Fill in what follows from other settings; while the object is made and never after."""
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @property
    def examples(self) -> str | None:
        """What is learned where nothing is sampled, as a plural; None where it learns from what the engine samples."""
        return None

    def check_data(self, train: Dataset[Any]) -> None:
        """Raises ConfigError for training data that cannot be learned, before anything is loaded."""

    @property
    def samples(self) -> bool:
        """Whether it learns from what the engine sampled."""
        return self.examples is None

    @property
    def serial(self) -> bool:
        return self.deterministic

    @property
    def logprob_gap_limit(self) -> float:
        """The largest difference allowed between log-probs of engine and learner on the same token."""
        if self.max_logprob_gap is not None:
            return self.max_logprob_gap
        if self.dtype not in ("float32", "float64"):
            return 0.5
        return LOGPROB_GAP if self.shape is None else self.shape.logprob_gap

    def rate(self, done: int, taken: int, tasks: int) -> float:
        """The learning rate after `done` steps that learned `taken` tasks, of a data set of so many."""
        height = self.peak_rate * min(1.0, (done + 1) / (self.warmup_steps + 1))
        if self.schedule == "constant":
            return height
        share = done / self.steps if self.steps is not None else taken / (self.epochs * tasks)
        left = max(0.0, 1 - share)
        return height * (left if self.schedule == "linear" else (1 - math.cos(math.pi * left)) / 2)

    @cached_property
    def peak_rate(self) -> float:
        """The learning rate that is taken, before its schedule."""
        if self.learning_rate is not None:
            return self.learning_rate
        return FALLBACK_RATE if self.shape is None else self.shape.learning_rate(adapter=self.trains_adapter)

    @cached_property
    def shape(self) -> ModelShape | None:
        """The model's sizes; None where the backend alone knows what the model is. Raises ModelError for no model."""
        return read_shape(self.model) if self.backend in ("embedded", "ray", "vllm") else None

    @property
    def trains_adapter(self) -> bool:
        """Whether LoRA adapters are trained, not the model's own weights."""
        return self.lora_rank is not None or bool(self.adapters)

    def steps_of(self, tasks: int, done: int = 0, position: int = 0) -> int:
        """How many steps a run on so many tasks has, if no group carries over.

        `done` of them, which took `position` tasks, were made before it was resumed, perhaps with other settings.
        """
        if self.steps is not None:
            return self.steps
        per_step, left = max(1, min(self.tasks_per_step, tasks)), max(0, self.epochs * tasks - position)
        if self.curriculum is not None:  # which draws, and knows no end of an epoch
            return done + math.ceil(left / per_step)
        epochs, rest = divmod(left, max(1, tasks))
        return done + epochs * math.ceil(tasks / per_step) + math.ceil(rest / per_step)

    def loss_config(self) -> LossConfig:
        """The loss that the learner minimises, with its settings."""
        spec = self.loss_spec
        low, high = spec.clip
        return LossConfig(
            name=spec.path,
            reference=spec.reference,
            clip_low=low if self.clip_low is None else self.clip_low,
            clip_high=high if self.clip_high is None else self.clip_high,
            entropy_coef=self.entropy_coef,
        )

    def credit_rule(self, *, shaped: bool = True) -> CreditRule:
        """How rewards become advantages. Not `shaped`: without punishment of length."""
        return CreditRule(
            mode=self.credit,
            advantage=self.advantage,
            gamma=self.gamma,
            total=self.rollout_return == "sum",
            by_call=self.group_by == "rollout",
            normalization=self.normalization,
            constant=self.max_context,
            keep_flat=self.entropy_coef != 0 or self.loss_config().kl_coef != 0 or self.credit_mode.critic,
            uses=self.outcome_use,
            rewardless=self.credit_mode.teacher,
            weights=self.reward_weights,
        )

    @property
    def validates_before(self) -> bool:
        """Whether the model is validated as it came."""
        return self.val_every > 0 if self.val_before is None else self.val_before

    @property
    def loss_spec(self) -> LossSpec:
        """The loss and what it needs."""
        return as_loss(self.loss)

    @property
    def estimator(self) -> Estimator:
        """The advantage and what it needs."""
        return as_estimator(self.advantage)

    @property
    def credit_mode(self) -> CreditMode:
        """The way of credit and what it needs."""
        if self.credit not in CREDIT_MODES:
            raise ConfigError(f"credit is {self.credit!r}; {can_be(self.credit, CREDIT_MODES)}")
        return CREDIT_MODES[self.credit]

    @property
    def compares_siblings(self) -> bool:
        """Whether an advantage is what a rollout earned more than its siblings."""
        return self.estimator.siblings and self.credit_mode.compares

    @property
    def is_supervised(self) -> bool:
        """Whether good rollouts are learned as they are, from any weights."""
        return self.estimator.selects

    @property
    def is_off_policy(self) -> bool:
        """Whether rollouts may come from older weights than the ones that learn from them."""
        return self.max_staleness > 0 or self.quorum < 1

    def chooses(self, *names: str) -> bool:
        """Whether any of these settings is another than the default of this algorithm."""
        known = settings_of(type(self))
        return any(value_of(self, name) != known[name].default for name in names)

    @property
    def clips_nothing(self) -> bool:
        """Whether each token is learned once, under the weights that sampled it: then all ratios are 1."""
        return self.loss_spec.clips and self.minibatches * self.update_epochs == 1 and not self.is_off_policy
