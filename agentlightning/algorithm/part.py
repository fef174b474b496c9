"""What a feature of a training run is: a `Part`, a record of settings with the few hooks that it needs.

A part makes hooks for the run (`RunHooks`), for the updates of each policy (`PolicyHooks`), or for both. The loop calls
them in the order of `features.PARTS`, those of the user last, and knows no feature by name. A part that no setting asks
for is not there. Parts of your own: `GRPO(…, parts=[MyPart()])`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.credit.units import CreditRule, make_units
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend import Backend
from agentlightning.errors import ConfigError
from agentlightning.learner.base import Learner, LossConfig, PackedBatch, PassResult, StepResult
from agentlightning.learner.packing import CreditedCall, pack, split_by_budget
from agentlightning.litagent import LitAgent
from agentlightning.metrics import Reporter
from agentlightning.metrics.catalogue import Metric
from agentlightning.types import Dataset
from agentlightning.types.arrays import Float32Array, np
from agentlightning.types.finding import Finding

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled

State = Any
"""What a hook keeps in checkpoints: anything that JSON can hold. None: nothing."""


class RunRecord(Protocol):
    """What a store has of a run, as `agl why` reads it."""

    @property
    def settings(self) -> Mapping[str, Any]:
        """By name, as JSON values."""
        ...

    @property
    def steps(self) -> Sequence[Mapping[str, Any]]:
        """The metrics of each step, in order."""
        ...

    @property
    def episodes(self) -> Sequence[Episode]:
        """The last rollouts."""
        ...


@dataclass(frozen=True, slots=True)
class RunScope:
    """The run that hooks are made for."""

    settings: TrainingSettings
    context: TrainingContext
    tasks: Dataset[Any]
    """The training tasks."""
    backend: Backend
    policies: Sequence[str]
    """The aliases of the policies in training."""
    step: int
    """Steps that the run had learned before: 0, or those of the checkpoint that it goes on from."""


@dataclass(frozen=True, slots=True)
class PolicyScope:
    """The policy whose updates hooks are made for."""

    settings: TrainingSettings
    learner: Learner
    reporter: Reporter

    def split(self, calls: Sequence[CreditedCall]) -> list[list[CreditedCall]]:
        """The calls in passes of at most `tokens_per_batch` tokens."""
        settings = self.settings
        return split_by_budget(calls, settings.tokens_per_batch, whole_groups=settings.loss_spec.pairs)


@dataclass(frozen=True, slots=True, eq=False)
class Minibatch:
    """What one optimiser step learns from."""

    sections: Sequence[Sequence[PackedBatch]]
    """Passes, in sections whose gradients hooks may tell apart; most often one."""
    shares: Sequence[float]
    """The weight of each section in the loss; they add up to 1."""
    groups: int
    """Groups of siblings in it."""

    @property
    def passes(self) -> list[PackedBatch]:
        """The passes of all sections, in their order."""
        return [one for section in self.sections for one in section]


@dataclass(frozen=True, slots=True)
class Updated:
    """What came of one optimiser step."""

    minibatch: Minibatch
    passed: PassResult
    step: StepResult


@dataclass(slots=True, eq=False)
class ComparedPass:
    """A pass over the calls of a step before they have credit, with the calls that it holds."""

    batch: PackedBatch
    calls: Sequence[CreditedCall]

    def by_call(self, values_E: Float32Array) -> dict[str, Float32Array]:
        """One value per entry of the pass, by call id."""
        ends = np.cumsum([len(c.call.response_ids) for c in self.calls])[:-1]
        ids = [c.call.info.call_id for c in self.calls]
        return dict(zip(ids, np.split(values_E, ends), strict=True))


@dataclass(eq=False)
class Update:
    """One step of a policy on its way from rollouts to weights. Hooks read it and change it."""

    scope: PolicyScope
    rule: CreditRule
    episodes: Sequence[Episode]
    version: int
    """The version of the learner's weights."""
    step: int | None = None
    """Steps that the run has learned before this one; None where a stored step is only looked at."""
    values: dict[str, Float32Array] = field(default_factory=dict)
    """By call id, one number for each sampled token: what the way of credit compares with (`modes.Values`)."""
    bonuses: dict[str, float] = field(default_factory=dict)
    """By call id: what is added to the call's reward."""
    batches: Sequence[Sequence[CreditedCall]] = ()
    """The calls of each minibatch with their advantages and weights, once there is credit."""
    minibatches: Sequence[Minibatch] = ()
    """The same in passes, once they are packed. A minibatch without passes has nothing to learn."""
    metrics: dict[str, Any] = field(default_factory=dict)
    """What the step's row says of the update."""

    def is_due(self, every: int) -> bool:
        """Whether what happens every so many steps (0: never) happens in this one."""
        return self.step is not None and every > 0 and self.step % every == 0

    def add_bonuses(self, bonuses: Mapping[str, float]) -> None:
        """Add to the rewards of calls, by call id."""
        for call_id, bonus in bonuses.items():
            self.bonuses[call_id] = self.bonuses.get(call_id, 0.0) + bonus

    @cached_property
    def compared(self) -> list[ComparedPass]:
        """Passes over all calls that are trained, worth nothing yet: to compare them with another model."""
        calls: list[CreditedCall] = []
        for number, unit in enumerate(make_units(self.episodes, self.rule, {})):
            for call in unit.calls if unit.counts else ():
                zeros = np.zeros(len(call.response_ids), dtype=np.float32)
                calls.append(CreditedCall(call, number, unit.rollout, zeros, zeros))
        return [ComparedPass(pack(some), some) for some in self.scope.split(calls)]

    async def own_logprobs(self, batch: PackedBatch) -> Float32Array:
        """How likely the weights as they are find the entries of a pass, [E]; older ones may have sampled them."""
        return await self.scope.learner.forward(batch) if self.scope.settings.is_off_policy else batch.old_logprobs_E


class RunHooks:
    """What a part does in a run. Override what it needs; all else does nothing."""

    async def load(self, state: State) -> None:
        """Go on from what `state` was when the checkpoint was written. Called for resumed runs that have it."""

    def state(self) -> State:
        """What a checkpoint keeps."""
        return None

    def choose(self, position: int, count: int, besides: Sequence[int]) -> list[int] | None:
        """Indices of the tasks that follow the first `position` ones: `count`, and none of `besides`. None: leave the
        choice to others."""
        return None

    def metadata(self, step: int, group: int) -> Mapping[str, Any]:
        """What the metadata of a group's rollouts says besides."""
        return {}

    def validation_metadata(self) -> Mapping[str, Any]:
        """What the metadata of validation rollouts says besides."""
        return {}

    async def begin(self) -> None:
        """Before the first step. Raises an error of ours where the run cannot go well."""

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        """Groups of rollouts, by their ids, have finished and are not yet read from the store."""

    def sampled(self, groups: Sequence[tuple[int, Sequence[Episode]]]) -> None:
        """Groups have finished: the index of each one's task, and its rollouts."""

    def check(self, sampled: Sampled) -> None:
        """Before a step is learned. Raises AgentError where it should not be."""

    def again(self, step: int) -> Sequence[Episode]:
        """Further rollouts that step `step` (counted from 1) learns: those of earlier steps again, or continuations."""
        return ()

    def learned(self, sampled: Sampled, again: Sequence[Episode]) -> Mapping[str, Any]:
        """After a step is learned; further metrics."""
        return {}

    async def published(self, step: int, versions: Mapping[str, int], episodes: Sequence[Episode]) -> Mapping[str, Any]:
        """After `step` steps the engines sample from new weights: the version of each policy that learned anything.
        Returns further metrics."""
        return {}

    def measure(self, sampled: Sampled) -> Mapping[str, Any]:
        """Metrics of a step's rollouts."""
        return {}

    def after_step(self, metrics: Mapping[str, Any]) -> None:
        """After the step's row was reported."""

    @property
    def ends_run(self) -> bool:
        """Whether the run is done with this step."""
        return False

    @property
    def needs_checkpoint(self) -> bool:
        """Whether what was learned should be saved now."""
        return False

    async def saved(self, run_dir: Path, step: int) -> None:
        """After a checkpoint was written."""


class PolicyHooks:
    """What a part does in the updates of a policy. Override what it needs; all else does nothing."""

    async def load(self, state: State) -> None:
        """As in `RunHooks`."""

    def state(self) -> State:
        """As in `RunHooks`."""
        return None

    async def before_credit(self, update: Update) -> None:
        """Change what rollouts earned (`episodes`, `bonuses`), or say what calls are compared with (`values`)."""

    async def after_credit(self, update: Update) -> None:
        """Look at the advantages (`batches`), or change them."""

    def sections(self, update: Update, batch: Sequence[CreditedCall]) -> Sequence[Sequence[CreditedCall]] | None:
        """Divide the calls of a minibatch into sections. None: leave that to others."""
        return None

    async def packed(self, update: Update) -> None:
        """Change the passes (`minibatches`): weights, masks, where ratios start."""

    def loss(self, loss: LossConfig) -> LossConfig:
        """The loss as it is minimised now."""
        return loss

    async def after_section(self, share: float) -> None:
        """Between two sections: the gradient of the first ones is there. `share`: the weight of the last one."""

    def after_pass(self, update: Update, minibatch: Minibatch, passed: PassResult) -> None:
        """The gradient of a minibatch is there and no step was made. Raises EngineError where none should be."""

    async def after_update(self, update: Update, done: Sequence[Updated]) -> None:
        """After the optimiser steps; `update.metrics` takes further metrics."""


def refuse_below_zero(settings: TrainingSettings, what: str, name: str, *, given: bool) -> None:
    """Raises ConfigError where `what`, the setting `name`, is `given` and takes rewards below zero, and the advantage
    is for others."""
    if given and settings.estimator.from_zero and settings.credit_mode.compares:
        raise ConfigError(
            f"advantage={settings.advantage!r} is for rewards of at least 0, and {what} takes them below. Leave {name} "
            "out, or take another advantage."
        )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A feature: its settings are the fields of the record that inherits from this."""

    name: ClassVar[str] = "part"
    """The key of its state in checkpoints: the class's name in small letters, unless the class says another."""
    metrics: ClassVar[tuple[Metric, ...]] = ()
    """What it reports of a step, by the names in `metrics.jsonl`, with what pages and tables say of it."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if "name" not in vars(cls):
            cls.name = cls.__name__.lower()

    @classmethod
    def given(cls, settings: TrainingSettings) -> Self:
        """The part's record among the settings, whether it is asked for or not."""
        return next(one for f in fields(settings) if isinstance(one := getattr(settings, f.name), cls))

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        """The part as the settings ask for it; None where they do not."""
        return None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        """Raises ConfigError for settings that the feature does not go together with."""

    def check_agent(self, settings: TrainingSettings, agent: LitAgent[Any]) -> None:
        """Raises ConfigError for an agent that the feature does not go together with, before a model is loaded."""

    @classmethod
    def findings(cls, record: RunRecord) -> Iterable[Finding]:
        """What `agl why` says of a run because of this feature."""
        return ()

    def in_run(self, run: RunScope) -> RunHooks | None:
        """What it does in a run, with state of its own for each."""
        return None

    def in_policy(self, policy: PolicyScope) -> PolicyHooks | None:
        """What it does in the updates of a policy, with state of its own for each."""
        return None
