"""Credit by branches: what a state in the middle of a rollout is worth, by rollouts that go on from it.

A continuation is a fork: its first calls are answered from the record of the rollout, so that the agent is in the same
state, and the rest is sampled. The mean of what m continuations earn estimates the value of the state, and a turn is
worth the value after it less the value before it (VinePPO, Kazemnejad et al., arXiv 2410.01679, section 4, for turns in
place of steps of reasoning; `modes.branches`). No critic is trained.

The gradient stays that of the reward, because a turn is chosen by a draw of its own, among the first of which no more
than `turns` are taken. Nothing that comes after a turn has a say, so the values that a call is compared with do not
depend on what the call did, and those that follow it are right on average. A choice among all turns of a finished
rollout, such as "the most uncertain ones", would not be so.

The values of a rollout's states stand in its metadata, so that they are there when the run goes on after a kill.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PositiveInt

from agentlightning.algorithm.credit.units import STATES, known_states, make_units, state_values
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.part import Part, PolicyHooks, PolicyScope, RunHooks, RunScope, Update
from agentlightning.algorithm.parts.constraint import Constraints
from agentlightning.algorithm.parts.scales import Scales
from agentlightning.algorithm.records import value_of
from agentlightning.algorithm.sampling.rollouts import run_rollouts
from agentlightning.algorithm.settings import Share, TrainingSettings
from agentlightning.arguments import Needs, SettingsGroup
from agentlightning.errors import ConfigError
from agentlightning.gateway.replay import REPLAYED
from agentlightning.types import EnqueueRolloutRequest, RecordedAttempt, RolloutMode, recorded_tools, recording_of
from agentlightning.types.arrays import np
from agentlightning.types.recording import FORK_OF, tool_call_ids_of

if TYPE_CHECKING:
    from agentlightning.algorithm.episode import Sampled

_BRANCHES = Needs(lambda s: s.credit_mode.branches, "credit='branches'")


@dataclass(frozen=True, kw_only=True)
class Branches(SettingsGroup, Part):
    """How states are valued: `GRPO(…, credit="branches", branches=agl.Branches(continuations=8))`."""

    name = "branches"

    continuations: Annotated[PositiveInt, _BRANCHES] = 4
    """Rollouts that go on from each state that is valued. The mean of one or two is too uncertain to help much."""
    share: Annotated[Share, _BRANCHES] = 0.5
    """How likely the state before a turn is valued; that before the first turn is known from the siblings."""
    turns: Annotated[PositiveInt, _BRANCHES] = 2
    """States of one rollout that are valued at most."""

    @classmethod
    def of(cls, settings: TrainingSettings) -> Branches | None:
        return cls.given(settings) if settings.credit_mode.branches else None

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        if not settings.credit_mode.branches:
            return
        estimator = settings.estimator
        if not estimator.siblings or estimator.selects or estimator.whitens or estimator.decoupled:
            raise ConfigError(
                f"credit='branches' compares the value of a state with siblings, for which advantage="
                f"{settings.advantage!r} is not made; take 'rloo', 'drgrpo' or 'grpo'."
            )
        others = {
            "an algorithm that samples nothing": settings.is_supervised or not settings.samples,
            "group_judge": value_of(settings, "group_judge") is not None,
            "constraint": bool(Constraints.parts_in(settings)),
            "several policies": len(settings.adapters) > 1,
            "kl_in='reward'": settings.kl_coef != 0 and settings.kl_in == "reward",
            "overlong_tokens": settings.overlong_tokens is not None,
            "reward_scale": Scales.of(settings) is not None,
        }
        if found := [what for what, given in others.items() if given]:
            raise ConfigError(
                f"credit='branches' does not go together with {' and '.join(found)}: rollouts and their continuations "
                "have to earn their rewards in the same way. Leave it out, or take another credit."
            )

    def in_run(self, run: RunScope) -> RunHooks:
        return _Branching(self, run)

    def in_policy(self, policy: PolicyScope) -> PolicyHooks:
        return _KnownStates()


@dataclass(frozen=True, slots=True, eq=False)
class _State:
    """Where a rollout was before one of its calls."""

    episode: Episode
    at: int
    """Index of that call."""
    recording: RecordedAttempt


class _Branching(RunHooks):
    def __init__(self, part: Branches, run: RunScope) -> None:
        self._part = part
        self._run = run
        self._store = run.context.store
        self._warned = False

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        settings = self._run.settings
        read = await collect(self._store, [i for group in groups for i in group], settings.reward_weights)
        found = {e.rollout.rollout_id: e for e in read}
        new = [
            (found[rollout_id], number)
            for group in groups
            for number, rollout_id in enumerate(group)
            if rollout_id in found and not known_states(found[rollout_id].rollout)
        ]
        states = {e.rollout.rollout_id: await self._states(e, number) for e, number in new}
        requests = [request for of_one in states.values() for s in of_one for request in await self._requests(s)]
        step = new[0][0].rollout.metadata["step"] if new else 0
        forks: dict[tuple[str, int], list[Episode]] = {}
        status = f"step {step}: going on from states"
        for fork in await run_rollouts(self._run.context, requests, status, settings.reward_weights, settings.stall):
            forks.setdefault((fork.rollout.metadata[FORK_OF], fork.rollout.metadata["at"]), []).append(fork)
        for episode, _ in new:
            about: dict[str, Any] = {"of": episode.rollout.rollout_id, "values": {}, "forks": 0, "lost": 0, "tokens": 0}
            for state in states[episode.rollout.rollout_id]:
                went_on = forks.get((episode.rollout.rollout_id, state.at), [])
                earned = [x for fork in went_on if (x := self._earned(fork, state)) is not None]
                if earned:
                    about["values"][episode.calls[state.at].info.call_id] = fmean(earned)
                about["forks"] += len(went_on)
                about["lost"] += len(went_on) - len(earned)
                about["tokens"] += sum(len(c.response_ids) for fork in went_on for c in fork.calls if not _replayed(c))
            await self._store.update_rollout(
                episode.rollout.rollout_id, metadata={**episode.rollout.metadata, STATES: about}
            )

    async def _states(self, episode: Episode, number: int) -> list[_State]:
        """Those of a rollout that are valued, the rollout being the `number`-th of its siblings."""
        part, about, settings = self._part, episode.rollout.metadata, self._run.settings
        if settings.credit_rule().uses[episode.outcome] != "train":
            return []
        turns = [n for n, call in enumerate(episode.calls) if call.info.trained and len(call.response_ids)]
        random = np.random.default_rng([settings.seed, about["step"], zlib.crc32(str(about["group"]).encode()), number])
        chosen = [n for n in turns[1:] if random.random() < part.share][: part.turns]
        if not chosen:
            return []
        spans = (await self._store.query_spans(episode.rollout.rollout_id, "latest")).items
        tools = tool_call_ids_of(spans)
        done = [recorded_tools(spans, episode.calls[n:]) for n in chosen]
        answered = [[c for c in episode.calls[:n] if len(c.response_ids)] for n in chosen]
        name = episode.rollout.rollout_id
        return [
            _State(episode, n, recording_of(name, calls, tools, diverged="refuse", tools=before))
            for n, calls, before in zip(chosen, answered, done, strict=True)
        ]

    async def _requests(self, state: _State) -> list[EnqueueRolloutRequest]:
        """The rollouts that go on from a state. Its record is stored once."""
        rollout, context = state.episode.rollout, self._run.context
        given = context.resources.resources if context.resources else {}
        stored = await self._store.add_resources({**given, STATES: state.recording})
        request = EnqueueRolloutRequest(
            input=rollout.input,
            mode=RolloutMode.TRAIN,
            resources_id=stored.resources_id,
            config=self._run.settings.rollout_config,
            metadata={"step": rollout.metadata["step"], FORK_OF: rollout.rollout_id, "at": state.at},
        )
        return [request] * self._part.continuations

    def _earned(self, fork: Episode, state: _State) -> float | None:
        """What a continuation earned; None where it failed, or was not in the state."""
        units = make_units([fork], self._run.settings.credit_rule(), {})
        if sum(map(_replayed, fork.calls)) < len(state.recording.calls) or len(units) != 1 or not units[0].counts:
            return None
        return units[0].total

    def measure(self, sampled: Sampled) -> dict[str, Any]:
        known = [about for e in (*sampled.episodes, *sampled.dropped) if (about := known_states(e.rollout))]
        forks, lost = (sum(about[name] for about in known) for name in ("forks", "lost"))
        if forks and lost * 2 > forks and not self._warned:
            self._warned = True
            self._run.context.reporter.warn(
                f"{lost} of {forks} continuations failed, or their agent asked something else than in the rollout that "
                "they go on from, so that they say nothing of its states. Agents that use clocks or random numbers, or "
                "whose tools answer otherwise each time, need another credit than 'branches'."
            )
        return {
            "branches/states": sum(len(about["values"]) for about in known),
            "branches/forks": forks,
            "branches/lost": lost,
            "branches/tokens": sum(about["tokens"] for about in known),
        }


class _KnownStates(PolicyHooks):
    async def before_credit(self, update: Update) -> None:
        update.values |= state_values(update.episodes)


def _replayed(call: Any) -> bool:
    return REPLAYED in call.info.used
