"""The agent's own reward of a group: its `group_reward` sees the finished rollouts of a task together and rewards each.

What it returns is the rollout's reward from then on; numbers that the agent gave itself stay as further parts. A group
for which it fails becomes `judge_error`, which trains nothing. The rewards are spans of the rollouts, written for a
whole group at once, so whatever reads rewards from the store finds them and a resumed run does not compute them again.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentlightning.adapter.messages import policy_conversations
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.records import value_of
from agentlightning.algorithm.sampling.rollouts import mask_as_judge_error, unless_stopped
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.errors import ConfigError, JudgeError, RewardError, own_line
from agentlightning.litagent import LitAgent
from agentlightning.types import Outcome, Span
from agentlightning.types.data import GroupReward, Rewarded, RolloutRecord, Sibling
from agentlightning.types.names import ANNOTATION, GROUP_REWARDED, REWARDED_LATER
from agentlightning.types.reward import reward_attributes, whole_parts

PART = "group"
"""The name of a reward that was returned as a number."""
_AT_ONCE = 8
"""Groups that are rewarded at the same time."""


@dataclass(frozen=True, kw_only=True)
class GroupRewards(Part):
    """Present where rollouts are sampled in groups; it does something where the agent has a `group_reward`."""

    name = "group_reward"

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        return None if settings.is_supervised else cls()

    def check_agent(self, settings: TrainingSettings, agent: LitAgent[Any]) -> None:
        if agent.group_reward is None:
            return
        if value_of(settings, "explore") != "none":
            raise ConfigError(
                "explore does not go together with the agent's group_reward, which sees no rollouts that go on from "
                "others. Leave one of the two out."
            )
        if settings.credit != "broadcast" or settings.rollout_return != "final":
            raise ConfigError(
                "The agent has a group_reward, which gives each rollout one reward: it needs credit='broadcast' and "
                f"rollout_return='final', and they are {settings.credit!r} and {settings.rollout_return!r}."
            )

    def in_run(self, run: RunScope) -> RunHooks | None:
        function = run.context.group_reward
        return None if function is None else _Rewarding(function, run)


async def rewards_of(function: GroupReward, siblings: Sequence[Sibling]) -> list[Mapping[str, float]]:
    """What the function gives to each sibling, by name, the first of which trains.

    Raises JudgeError where the function fails, or returns anything but one reward for each sibling.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    try:
        found = await asyncio.to_thread(function, siblings)
        given = await found if inspect.isawaitable(found) else found
    except Exception as error:
        what = f"{type(error).__name__}: {error} ({own_line(error) or 'in a library'})."
        raise JudgeError(f"The agent's group_reward {name} failed: {what}") from error
    if isinstance(given, str | bytes | Mapping) or not hasattr(given, "__len__") or len(given) != len(siblings):
        what = f"{len(given)}" if hasattr(given, "__len__") and not isinstance(given, str) else f"{given!r:.60}"
        raise JudgeError(
            f"The agent's group_reward {name} was given {len(siblings)} siblings and returned {what}; return a list "
            "with one reward for each, in their order."
        )
    return [_by_name(one, name) for one in given]


def _by_name(given: Rewarded, name: str) -> Mapping[str, float]:
    parts = given if isinstance(given, Mapping) else {PART: given}
    try:
        reward_attributes(parts, next(iter(parts), None))
    except RewardError as error:
        raise JudgeError(f"The agent's group_reward {name} returned {given!r:.200}: {error}") from error
    return parts


class _Rewarding(RunHooks):
    def __init__(self, function: GroupReward, run: RunScope) -> None:
        self._function = function
        self._store = run.context.store
        self._context = run.context
        self._warned = False

    def metadata(self, step: int, group: int) -> Mapping[str, Any]:
        return {REWARDED_LATER: True}

    async def finished(self, groups: Sequence[Sequence[str]]) -> None:
        turns = asyncio.Semaphore(_AT_ONCE)

        async def one(rollout_ids: Sequence[str]) -> None:
            async with turns:
                await self._reward(await self._store.query_records(rollout_ids))

        async def all_of_them() -> None:
            await asyncio.gather(*map(one, groups))

        await unless_stopped(self._context.stop, all_of_them())

    async def _reward(self, records: Sequence[RolloutRecord]) -> None:
        """Reward a group, unless that was done before the run was interrupted."""
        good = [r for r in records if r.attempt and r.attempt.outcome in (Outcome.OK, Outcome.TRUNCATED)]
        if all(any(GROUP_REWARDED in span.attributes for span in r.spans) for r in good):
            return  # all are written at once; one alone is an agent's own span, and stops nobody's reward
        siblings = [await self._sibling(record) for record in good]
        try:
            found = await rewards_of(self._function, siblings)
        except JudgeError as error:
            self._warn_once(str(error))
            await mask_as_judge_error(self._store, good, str(error))
            return
        pairs = zip(good, siblings, found, strict=True)
        await self._store.add_many_spans([_span(record, sibling, parts) for record, sibling, parts in pairs])

    async def _sibling(self, record: RolloutRecord) -> Sibling:
        spans = (await self._store.query_spans(record.rollout.rollout_id, "latest")).items
        return Sibling(
            rollout=record.rollout,
            conversations=policy_conversations(record, spans),
            rewards=whole_parts(record.spans),
            spans=spans,
        )

    def _warn_once(self, why: str) -> None:
        if not self._warned:
            self._warned = True
            self._context.reporter.warn(f"{why} Groups without rewards train nothing.")


def _span(record: RolloutRecord, sibling: Sibling, parts: Mapping[str, float]) -> Span:
    """The rollout's reward: what the group was given, with what it had earned by itself as further parts."""
    assert record.attempt is not None
    return Span.from_attributes(
        name=ANNOTATION,
        attributes={GROUP_REWARDED: True, **reward_attributes({**sibling.rewards, **parts}, next(iter(parts)))},
        rollout_id=record.rollout.rollout_id,
        attempt_id=record.attempt.attempt_id,
    )
