"""Rollouts that go on from the states of others: forks that a training run makes by itself."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.credit.units import CreditRule, make_units
from agentlightning.algorithm.episode import Episode, Sampled
from agentlightning.algorithm.part import RunHooks
from agentlightning.algorithm.sampling.rollouts import run_rollouts
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.gateway.replay import REPLAYED
from agentlightning.litagent import LitAgent
from agentlightning.types import EnqueueRolloutRequest, RecordedAttempt, RolloutMode, recorded_tools
from agentlightning.types.recording import FORK_OF

logger = logging.getLogger(__name__)

RECORDING = "branches"
"""The name of the recording among a continuation's resources."""


@dataclass(frozen=True, slots=True, eq=False)
class ForkPoint:
    """A state of a rollout, that before one of its calls, with the record that leads there."""

    episode: Episode
    at: int
    """Index of that call."""
    recording: RecordedAttempt


@dataclass(frozen=True, slots=True, eq=False)
class Continued:
    """What came of going on from a state."""

    all: Sequence[Episode]
    good: Sequence[Episode]
    """Those that were in the state, and have a reward that counts."""
    earned: Sequence[float]
    """What the good ones earned."""

    @property
    def tokens(self) -> int:
        """How many were sampled for it."""
        return sum(len(c.response_ids) for fork in self.all for c in fork.calls if not is_replayed(c))


def turns_of(episode: Episode) -> list[int]:
    """Indices of the calls that are trained."""
    return [n for n, call in enumerate(episode.calls) if call.info.trained and len(call.response_ids)]


async def states_of(context: TrainingContext, episode: Episode, before: Sequence[int]) -> list[ForkPoint]:
    """The states of a rollout before the calls with these indices."""
    if not before:
        return []
    name = episode.rollout.rollout_id
    spans = (await context.store.query_spans(name, "latest")).items
    found: list[ForkPoint] = []
    for n in before:
        ids = [c.info.call_id for c in episode.calls[:n] if len(c.response_ids)]
        tools = recorded_tools(spans, episode.calls[n:])
        found.append(
            ForkPoint(episode, n, RecordedAttempt(rollout_id=name, call_ids=ids, diverged="refuse", tools=tools))
        )
    return found


async def go_on(
    context: TrainingContext, settings: TrainingSettings, states: Sequence[ForkPoint], times: int, step: int
) -> list[Continued]:
    """Let so many rollouts go on from each state, and wait for all of them. Raises Stopped as `run_rollouts` does."""
    requests = [one for state in states for one in [await _request(context, settings, state)] * times]
    status = f"step {step}: going on from states"
    done = await run_rollouts(context, requests, status, settings.reward_weights, settings.stall)
    rule = settings.credit_rule()
    found: list[Continued] = []
    for state in states:
        name = state.episode.rollout.rollout_id
        mine = [e for e in done if (e.rollout.metadata[FORK_OF], e.rollout.metadata["at"]) == (name, state.at)]
        earned = {n: value for n, e in enumerate(mine) if (value := _earned(e, state, rule)) is not None}
        found.append(Continued(mine, [mine[n] for n in earned], [*earned.values()]))
    return found


async def _request(context: TrainingContext, settings: TrainingSettings, state: ForkPoint) -> EnqueueRolloutRequest:
    """The rollout that goes on from a state. The state's record is stored once."""
    rollout = state.episode.rollout
    given = context.resources.resources if context.resources else {}
    stored = await context.store.add_resources({**given, RECORDING: state.recording})
    return EnqueueRolloutRequest(
        input=rollout.input,
        mode=RolloutMode.TRAIN,
        resources_id=stored.resources_id,
        config=settings.rollout_config,
        metadata={"step": rollout.metadata["step"], FORK_OF: rollout.rollout_id, "at": state.at},
    )


def _earned(fork: Episode, state: ForkPoint, rule: CreditRule) -> float | None:
    """What a continuation earned; None where it failed, or was not in the state."""
    units = make_units([fork], rule, {})
    if sum(map(is_replayed, fork.calls)) < len(state.recording.call_ids) or len(units) != 1 or not units[0].counts:
        return None
    return units[0].total


def is_replayed(call: Any) -> bool:
    """Whether a call was answered from a record."""
    return REPLAYED in call.info.used


def by_state(episodes: Sequence[Episode]) -> dict[str, dict[int, list[Episode]]]:
    """The continuations among rollouts: by the rollout that they go on from, and the index of the call before which."""
    found: dict[str, dict[int, list[Episode]]] = {}
    for episode in episodes:
        about = episode.rollout.metadata
        if FORK_OF in about:
            found.setdefault(about[FORK_OF], {}).setdefault(about["at"], []).append(episode)
    return found


class ContinuingHooks(RunHooks):
    """Hooks of a part that lets rollouts go on: the continuations of a rollout are learned with it."""

    def __init__(self) -> None:
        self._going_on: dict[str, Sequence[Episode]] = {}
        """The continuations of rollouts that are not learned yet, by rollout."""
        self._due: list[Episode] = []

    def check(self, sampled: Sampled) -> None:
        for episode in sampled.dropped:
            self._going_on.pop(episode.rollout.rollout_id, None)
        self._due = [one for e in sampled.episodes for one in self._going_on.pop(e.rollout.rollout_id, ())]

    def again(self, step: int) -> Sequence[Episode]:
        return self._due


def warn_of_shared_state(agent: LitAgent[Any], setting: str) -> None:
    """Warn of an agent that may find another state where it goes on than the rollout left, because of `setting`."""
    if agent.shared_state is not None:
        logger.warning(
            "%s goes on from the middle of rollouts, and its agent may find another state there: %s",
            setting,
            agent.shared_state,
        )
