"""Episodes: finished rollouts with what was sampled in them and what they earned, as an algorithm reads them.

Triplets that an agent returned say which calls are trained, each with its own reward. A triplet means a call of the
attempt: by `metadata["response_id"]` or `["call_id"]`, or because its token ids are the call's. One that means none is
trained from its own token ids if it brings the log-probs they were sampled with (`metadata["logprobs"]`, and in a run
of several policies `["policy"]`). Calls that no triplet means are not trained.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from pydantic import ValidationError

from agentlightning.store.base import LightningStore
from agentlightning.types import Attempt, Call, CallInfo, Outcome, Rollout, Span, Triplet
from agentlightning.types.arrays import Float32Array, Int32Array, np
from agentlightning.types.names import REWARD_RESPONSE, TRIPLET, TRIPLET_JSON
from agentlightning.types.reward import (
    Callers,
    callers_of,
    find_reward_spans,
    get_rewards,
    given_reward,
    has_parts,
    in_one_form,
    mean_value,
    of_trained,
    reward_error,
    weights_in,
    which_count,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Earned:
    """One reward of a rollout."""

    value: float
    call: int | None = None
    """Index of the call that earned it: the one it names, else the last one before it; None if there was none."""
    agent: str | None = None
    """The agent that gets the reward, if agents have rewards of their own; None: all agents."""
    named: bool = False
    """Whether it says itself which call it is for; such a reward is an intermediate one."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """What it was given as, where that was more than a number: its parts by name."""


@dataclass(frozen=True, slots=True, eq=False)
class Episode:
    """One finished rollout: its last attempt, the rewards of that attempt, and its calls in order."""

    rollout: Rollout
    attempt: Attempt | None
    reward: float | None
    """The mean of its rewards that count (`which_count`). One that was truncated before it earned anything has 0."""
    calls: Sequence[Call]
    rewards: Sequence[Earned] = ()
    """All of them, in order."""
    separate: bool = False
    """Whether each call has its own reward and none but that: the agent returned triplets."""
    refused: Sequence[str] = ()
    """Why requests to the model were refused before anything was sampled, one text each."""
    replayed: bool = False
    """Whether it is learned again, from an earlier step: what it earned is no news."""

    @property
    def outcome(self) -> Outcome:
        """A rollout without an outcome was never run: that is the system's failure."""
        return (self.attempt and self.attempt.outcome) or Outcome.INFRA_ERROR

    @property
    def good(self) -> bool:
        """Whether the rollout ended without a failure; a truncated one counts as good."""
        return self.outcome in (Outcome.OK, Outcome.TRUNCATED)

    def earned_by(self, *agents: str | None) -> float | None:
        """The mean of the rewards that count for these of its agents (`which_count`); None: nobody said.

        One that was truncated before they earned anything has 0.
        """
        counting = which_count(self.rewards, agents=agents)
        found = mean_value([r.value for r in counting]) if self.rewards else self.reward
        return 0.0 if found is None and self.outcome is Outcome.TRUNCATED else found

    def with_rewards(self, rewards: Sequence[Earned]) -> Episode:
        """The rollout as if it had earned these rewards."""
        counting = which_count(rewards, callers=self.callers)
        return replace(self, reward=mean_value([r.value for r in counting]), rewards=rewards)

    @property
    def callers(self) -> Callers:
        """Who called a model."""
        return _callers(self.calls)

    @property
    def sampled_tokens(self) -> int:
        """Tokens that the policy in training sampled."""
        return sum(len(c.response_ids) for c in self.calls if c.info.trained)


@dataclass(frozen=True, slots=True, eq=False)
class Sampled:
    """The rollouts of one step."""

    episodes: Sequence[Episode]
    tasks: Sequence[int]
    """The tasks of these rollouts, as indices into the data set."""
    position: int
    """How many tasks were taken since the start of the run, these included."""
    began: float
    """Seconds since the epoch."""
    seconds: float
    """What it took, whatever became of the clock meanwhile."""
    carried: Sequence[int] = ()
    """Tasks that were taken and whose rollouts are not finished; they come with a later step."""
    dropped: Sequence[Episode] = ()
    """Rollouts of groups that dynamic sampling replaced: nothing is learned from them."""


async def collect(
    store: LightningStore, rollout_ids: Sequence[str], reward_weights: Mapping[str, float] | None = None
) -> list[Episode]:
    """Read finished rollouts back from the store, in the order of `rollout_ids`; one read, however many they are.

    A reward of several named parts is its primary part, or, with `reward_weights`, the weighted sum of those of its
    parts that have a weight. Where no weights are given, a rollout has those of its run.
    """
    found = await store.query_records(rollout_ids)
    weights: dict[str | None, Mapping[str, float]] = {}
    if reward_weights is None:
        parted = [one.rollout.run_id for one in found if any(has_parts(span.attributes) for span in one.spans)]
        weights = {run_id: await weights_of(store, run_id) for run_id in dict.fromkeys(parted)}
    return [
        make_episode(one.rollout, one.attempt, one.calls, one.spans, reward_weights or weights.get(one.rollout.run_id))
        for one in found
    ]


async def weights_of(store: LightningStore, run_id: str | None) -> Mapping[str, float]:
    """By which a run adds up the parts of a reward."""
    run = await store.get_run_by_id(run_id) if run_id else None
    return {} if run is None else weights_in(run.settings)


def make_episode(
    rollout: Rollout,
    attempt: Attempt | None,
    calls: Sequence[Call],
    spans: Sequence[Span],
    reward_weights: Mapping[str, float] | None = None,
) -> Episode:
    """Put a rollout's calls and the rewards among its spans together; `reward_weights` as in `collect`."""
    for span in spans:
        if (wrong := reward_error(span.name, span.attributes)) is not None:
            logger.warning("A reward of rollout %s is left out. %s", span.rollout_id, wrong)
    rewards = [_earned(span, calls, reward_weights or {}) for span in find_reward_spans(spans)]
    final = mean_value([r.value for r in which_count(rewards, callers=_callers(calls))])
    if final is None and attempt is not None and attempt.outcome is Outcome.TRUNCATED:
        final = 0.0
    if given := given_triplets(spans):
        calls, which = calls_as_given(calls, given)
        pairs = [(t.reward, i) for (_, t), i in zip(given, which, strict=True)]
        own = [Earned(reward, i, named=True) for reward, i in pairs if reward is not None]
        return Episode(rollout, attempt, final, calls, own, separate=True)
    refused = [s.status.description or "" for s in spans if s.attributes.get("error.type") == "refused"]
    return Episode(rollout, attempt, final, calls, rewards, refused=refused)


def _earned(span: Span, calls: Sequence[Call], weights: Mapping[str, float]) -> Earned:
    given = given_reward(in_one_form(span.name, span.attributes), weights)
    assert given is not None, span
    response = span.attributes.get(REWARD_RESPONSE)
    found = [
        i
        for i, call in enumerate(calls)
        if (call.info.response_id == response if given.named else call.info.start_time <= (span.start_time or 0.0))
    ]
    parts = get_rewards(span) if has_parts(span.attributes) else {}
    return Earned(given.value, found[-1] if found else None, given.agent, given.named, parts)


def _callers(calls: Sequence[Call]) -> Callers:
    return callers_of((name, c.info.trained) for c in calls for name in (c.info.agent, c.info.policy))


def mean_reward(episodes: Sequence[Episode]) -> float | None:
    """The mean reward of the episodes that have one; None if none has."""
    rewards = [e.reward for e in episodes if e.reward is not None]
    return fmean(rewards) if rewards else None


def given_triplets(spans: Sequence[Span]) -> list[tuple[Span, Triplet]]:
    """The triplets among an attempt's spans, in order. Spans that cannot be read are left out, which is logged."""
    found: list[tuple[Span, Triplet]] = []
    for span in (s for s in spans if s.name == TRIPLET):
        try:
            found.append((span, Triplet.model_validate_json(span.attributes[TRIPLET_JSON])))
        except (KeyError, ValidationError) as error:
            logger.warning("A triplet of rollout %s cannot be read: %s", span.rollout_id, error)
    return found


def calls_as_given(calls: Sequence[Call], given: Sequence[tuple[Span, Triplet]]) -> tuple[list[Call], list[int | None]]:
    """The calls, trained only where a triplet says so, with those of its own at the end; and each triplet's call."""
    taken: list[Call] = list(calls)
    which: list[int | None] = []
    for span, triplet in given:
        index = next((i for i, c in enumerate(calls) if i not in which and _means(triplet, c)), None)
        if index is None and (own := _own_call(span, triplet)) is not None:
            taken.append(own)
            index = len(taken) - 1
        if index is None:
            logger.warning(
                "A triplet of rollout %s is not trained: no call of its attempt has its response_id or its token ids, "
                "and it brings no prompt and response of its own as token ids with finite metadata['logprobs'].",
                span.rollout_id,
            )
        which.append(index)
    meant = {i for i in which if i is not None}
    return [c if i in meant else replace(c, info=replace(c.info, trained=False)) for i, c in enumerate(taken)], which


def _means(triplet: Triplet, call: Call) -> bool:
    named = triplet.metadata.get("response_id"), triplet.metadata.get("call_id")
    if any(named):
        return call.info.response_id == named[0] or call.info.call_id == named[1]
    response, prompt = _ids(triplet.response), _ids(triplet.prompt)
    same = response is not None and np.array_equal(response, call.response_ids)
    return same and (prompt is None or np.array_equal(prompt, call.prompt_ids))


def _ids(part: Any) -> Int32Array | None:
    """The token ids of a prompt or response; None where there are none, or something else."""
    return _array(part.get("token_ids") if isinstance(part, dict) else None, np.int32)


def _array(values: Any, dtype: Any) -> Any:
    try:
        found = None if values is None else np.array(values, dtype=dtype)
    except (TypeError, ValueError, OverflowError):
        return None
    return found if found is not None and found.ndim == 1 else None


def _own_call(span: Span, triplet: Triplet) -> Call | None:
    prompt, response = _ids(triplet.prompt), _ids(triplet.response)
    own: Float32Array | None = _array(triplet.metadata.get("logprobs"), np.float32)
    if prompt is None or response is None or own is None or not len(prompt) or len(own) != len(response):
        return None
    if not np.isfinite(own).all() or min(prompt.min(), response.min(initial=0)) < 0:
        return None
    return made_call(
        span.span_id,
        span.rollout_id,
        span.attempt_id,
        prompt,
        response,
        own,
        policy=triplet.metadata.get("policy", "given"),
        agent=triplet.metadata.get("agent_name"),
        ended=span.end_time or 0.0,
        started=span.start_time or 0.0,
    )


def made_call(
    call_id: str,
    rollout_id: str,
    attempt_id: str,
    prompt: Int32Array,
    response: Int32Array,
    logprobs: Float32Array,
    *,
    policy: str = "policy",
    agent: str | None = None,
    started: float = 0.0,
    ended: float = 0.0,
) -> Call:
    """A trained call that no engine of ours sampled; `logprobs` has one value per response token, at temperature 1."""
    info = CallInfo(
        call_id=call_id,
        response_id=call_id,
        rollout_id=rollout_id,
        attempt_id=attempt_id,
        choice=0,
        policy=policy,
        trained=True,
        agent=agent,
        parent_call_id=None,
        model="given",
        dialect="given",
        finish_reason="stop",
        start_time=started,
        end_time=ended,
        temperature=1.0,
    )
    return Call(info, prompt, response, logprobs, logprobs, ())


def reward_parts(episodes: Sequence[Episode]) -> dict[str, float]:
    """Mean of each named part of the rewards, over the rollouts that have it. Of those rewards of a rollout that have a
    part the same ones count as for what it earned (`which_count`).
    """
    found: dict[str, list[float]] = {}
    for e in episodes:
        rewards = of_trained(e.rewards, e.callers)
        for name in dict.fromkeys(name for reward in rewards for name in reward.parts):
            counting = which_count([r for r in rewards if name in r.parts])
            found.setdefault(name, []).append(fmean(r.parts[name] for r in counting))
    return {name: fmean(values) for name, values in sorted(found.items())}
