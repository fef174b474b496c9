"""Running a set of rollouts to their end: enqueue, wait, read back; and stop at once when the user says so."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.algorithm.measures import of_validation
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.algorithm.stall import StallRule, watch_for_stalls
from agentlightning.errors import NotFoundError, StoreError
from agentlightning.gateway.sampling.settings import mix
from agentlightning.store.base import LightningStore
from agentlightning.types import FINISHED_ROLLOUT, Dataset, EnqueueRolloutRequest, Outcome, RolloutMode, RolloutStatus
from agentlightning.types.data import RolloutRecord
from agentlightning.types.rollout import SAMPLING_SEED

STATUS_SECONDS = 1.0


class Stopped(Exception):
    """The user asked to stop; rollouts that were under way are cancelled."""


async def unless_stopped(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Do some work. Raises Stopped as soon as the user stops, and gives up what is not done."""
    doing, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({doing, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            raise Stopped
        doing.result()
    finally:
        for task in (doing, stopping):
            task.cancel()
        await asyncio.gather(doing, stopping, return_exceptions=True)


async def mask_as_judge_error(store: LightningStore, records: Sequence[RolloutRecord], why: str) -> None:
    """Let these rollouts teach nothing, since what rewards them failed."""
    for record in records:
        assert record.attempt is not None
        await store.update_attempt(
            record.rollout.rollout_id, record.attempt.attempt_id, outcome=Outcome.JUDGE_ERROR, error=why
        )


def sampling_seed(seed: int | None, *what: int | str) -> dict[str, Any]:
    """Metadata that has a rollout draw as all others with the same seed of the same `what` do; none without a seed."""
    return {} if seed is None else {SAMPLING_SEED: mix(seed, *what)}


async def enqueue(context: TrainingContext, requests: Sequence[EnqueueRolloutRequest]) -> list[str]:
    """Enqueue rollouts under the context's resources; their ids, in the order of the requests."""
    if context.stop.is_set():
        raise Stopped
    if not requests:
        return []
    resources_id = context.resources.resources_id if context.resources else None
    here = {"run_id": context.run_id}
    bound = [r.model_copy(update={"resources_id": r.resources_id or resources_id, **here}) for r in requests]
    return [rollout.rollout_id for rollout in await context.store.enqueue_many_rollouts(bound)]


async def run_rollouts(
    context: TrainingContext,
    requests: Sequence[EnqueueRolloutRequest],
    status: str,
    reward_weights: Mapping[str, float] | None = None,
    stall: StallRule | None = None,
) -> list[Episode]:
    """Run rollouts and return them finished, in the order of the requests. `reward_weights`: see `collect`.

    Raises Stopped when `context.stop` is set meanwhile.
    """
    ids = await enqueue(context, requests)
    await finished_groups(context, [ids], 1, status, stall)
    return await collect(context.store, ids, reward_weights)


async def run_validation(
    context: TrainingContext, settings: TrainingSettings, dataset: Dataset[Any], metadata: Mapping[str, Any]
) -> dict[str, float | None]:
    """What the validation tasks were worth, see `measures.of_validation`; no number if the user stopped it.

    `metadata`: of all their rollouts, with the step. All validations of a run draw alike, so that a curve rises and
    falls with the policy more than by chance.
    """
    requests = [
        EnqueueRolloutRequest(
            input=dataset[i],
            mode=RolloutMode.VAL,
            config=settings.rollout_config,
            metadata={**metadata, **sampling_seed(settings.seed, "val", i, repeat)},
        )
        for i in range(len(dataset))
        for repeat in range(settings.val_repeats)
    ]
    status = f"step {metadata['step']}: validating"
    try:
        episodes = await run_rollouts(context, requests, status, settings.reward_weights, settings.stall)
    except Stopped:
        return {"val_reward": None}
    return {**of_validation(episodes, settings.val_repeats)}


async def finished_groups(
    context: TrainingContext, groups: Sequence[Sequence[str]], need: int, status: str, stall: StallRule | None = None
) -> list[int]:
    """Wait until `need` of the groups (rollout ids) are finished to the last rollout; the indices of those that are.

    `stall` says when what it waits for is named (see `stall`); None: never.
    Raises Stopped when `context.stop` is set meanwhile. Then, and when cancelled, the rollouts are cancelled.
    """
    ids = [rollout_id for group in groups for rollout_id in group]
    together = need == len(groups)  # then one wait is for all of them
    waited = [ids] if together else groups
    waits = [asyncio.create_task(context.store.wait_for_rollouts(rollout_ids=g, timeout=None)) for g in waited]
    stopping = asyncio.create_task(context.stop.wait())
    ticker = asyncio.create_task(_tick(context, len(ids), status))
    rule = stall or StallRule(seconds=math.inf)
    watching = asyncio.create_task(watch_for_stalls(context, ids, rule, status, lambda: cancel(context, ids)))
    try:
        while sum(wait.done() for wait in waits) < (1 if together else need):
            open_waits = [wait for wait in waits if not wait.done()]
            await asyncio.wait({*open_waits, stopping, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done():
                await cancel(context, ids)
                watching.result()
            if stopping.done():
                await cancel(context, ids)
                raise Stopped
        done = [index for index, wait in enumerate(waits) if wait.done()]
        for index in done:
            waits[index].result()
        return list(range(len(groups))) if together else done
    except asyncio.CancelledError:
        await cancel(context, ids)
        raise
    finally:
        helpers: list[asyncio.Task[Any]] = [*waits, stopping, ticker, watching]
        for task in helpers:
            task.cancel()
        await asyncio.gather(*helpers, return_exceptions=True)


async def _tick(context: TrainingContext, total: int, status: str) -> None:
    """Show how many rollouts are done. The counters are the store's, so this costs one small read."""
    before = await _finished(context)
    while True:
        context.reporter.status(f"{status} {await _finished(context) - before}/{total} rollouts")
        await asyncio.sleep(STATUS_SECONDS)


async def _finished(context: TrainingContext) -> int:
    counts = (await context.store.statistics())["rollouts"]
    return sum(counts.get(status, 0) for status in FINISHED_ROLLOUT)


async def cancel(context: TrainingContext, rollout_ids: Sequence[str]) -> None:
    """Cancel those of the rollouts that are not finished."""
    for rollout_id in rollout_ids:
        try:
            await context.store.update_rollout(rollout_id, status=RolloutStatus.CANCELLED)
        except NotFoundError:
            raise
        except StoreError:
            continue  # it finished just now
