"""The hooks of all parts as one: called one after the other, in the order of the parts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from agentlightning.algorithm.episode import Episode, Sampled
from agentlightning.algorithm.part import (
    Minibatch,
    Part,
    PolicyHooks,
    PolicyScope,
    RunHooks,
    RunScope,
    State,
    Update,
    Updated,
)
from agentlightning.errors import ConfigError
from agentlightning.learner.base import LossConfig, PassResult
from agentlightning.learner.packing import CreditedCall

T = TypeVar("T")


class PartsOfRun(RunHooks):
    """The hooks of all parts in a run."""

    def __init__(self, parts: Sequence[Part], run: RunScope) -> None:
        made = {part.name: part.in_run(run) for part in parts}
        self._hooks = {name: hooks for name, hooks in made.items() if hooks is not None}
        self._all = list(self._hooks.values())

    async def load(self, state: Mapping[str, State]) -> None:
        await _load(self._hooks, state)
        for hooks in self._all:
            await hooks.begin()

    def state(self) -> dict[str, State]:
        return _states(self._hooks)

    def choose(self, position: int, count: int, besides: Sequence[int]) -> list[int] | None:
        return _first(hooks.choose(position, count, besides) for hooks in self._all)

    def metadata(self, step: int, group: int) -> dict[str, Any]:
        return _merged(hooks.metadata(step, group) for hooks in self._all)

    def validation_metadata(self) -> dict[str, Any]:
        return _merged(hooks.validation_metadata() for hooks in self._all)

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        for hooks in self._all:
            await hooks.finished(groups)

    def sampled(self, groups: Sequence[tuple[int, Sequence[Episode]]]) -> None:
        for hooks in self._all:
            hooks.sampled(groups)

    def check(self, sampled: Sampled) -> None:
        for hooks in self._all:
            hooks.check(sampled)

    def again(self, step: int) -> list[Episode]:
        return [episode for hooks in self._all for episode in hooks.again(step)]

    def learned(self, sampled: Sampled, again: Sequence[Episode]) -> dict[str, Any]:
        return _merged(hooks.learned(sampled, again) for hooks in self._all)

    async def published(self, step: int, versions: Mapping[str, int], episodes: Sequence[Episode]) -> dict[str, Any]:
        return _merged([await hooks.published(step, versions, episodes) for hooks in self._all])

    def measure(self, sampled: Sampled) -> dict[str, Any]:
        return _merged(hooks.measure(sampled) for hooks in self._all)

    def after_step(self, metrics: Mapping[str, Any]) -> None:
        for hooks in self._all:
            hooks.after_step(metrics)

    @property
    def ends_run(self) -> bool:
        return any(hooks.ends_run for hooks in self._all)

    @property
    def needs_checkpoint(self) -> bool:
        return any(hooks.needs_checkpoint for hooks in self._all)

    async def saved(self, run_dir: Path, step: int) -> None:
        for hooks in self._all:
            await hooks.saved(run_dir, step)


class PartsOfPolicy(PolicyHooks):
    """The hooks of all parts in a policy's updates."""

    def __init__(self, parts: Sequence[Part], policy: PolicyScope) -> None:
        made = {part.name: part.in_policy(policy) for part in parts}
        self._hooks = {name: hooks for name, hooks in made.items() if hooks is not None}
        self._all = list(self._hooks.values())

    async def load(self, state: Mapping[str, State]) -> None:
        await _load(self._hooks, state)

    def state(self) -> dict[str, State]:
        return _states(self._hooks)

    async def before_credit(self, update: Update) -> None:
        for hooks in self._all:
            await hooks.before_credit(update)

    async def after_credit(self, update: Update) -> None:
        for hooks in self._all:
            await hooks.after_credit(update)

    def sections(self, update: Update, batch: Sequence[CreditedCall]) -> Sequence[Sequence[CreditedCall]] | None:
        return _first(hooks.sections(update, batch) for hooks in self._all)

    async def packed(self, update: Update) -> None:
        for hooks in self._all:
            await hooks.packed(update)

    def loss(self, loss: LossConfig) -> LossConfig:
        for hooks in self._all:
            loss = hooks.loss(loss)
        return loss

    async def after_section(self, share: float) -> None:
        for hooks in self._all:
            await hooks.after_section(share)

    def after_pass(self, update: Update, minibatch: Minibatch, passed: PassResult) -> None:
        for hooks in self._all:
            hooks.after_pass(update, minibatch, passed)

    async def after_update(self, update: Update, done: Sequence[Updated]) -> None:
        for hooks in self._all:
            await hooks.after_update(update, done)


async def _load(hooks: Mapping[str, RunHooks] | Mapping[str, PolicyHooks], state: Mapping[str, State]) -> None:
    """`state`: by the parts' names. A part that is missing there stays as it is."""
    for name, one in hooks.items():
        if name in state:
            await one.load(state[name])


def _states(hooks: Mapping[str, RunHooks] | Mapping[str, PolicyHooks]) -> dict[str, State]:
    """By the parts' names. Raises ConfigError for what a checkpoint cannot keep."""
    found = {name: state for name, one in hooks.items() if (state := one.state()) is not None}
    for name, state in found.items():
        try:
            json.dumps(state)
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"The state of the part '{name}' cannot be kept in a checkpoint: {error}. Let its state() return what "
                "JSON holds: numbers, texts, lists, dicts by name."
            ) from error
    return found


def _first(found: Iterable[T | None]) -> T | None:
    return next((one for one in found if one is not None), None)


def _merged(found: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for one in found for name, value in one.items()}
