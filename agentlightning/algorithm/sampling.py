"""Running a set of rollouts to their end: enqueue, wait, read back; and stop at once when the user says so."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.errors import NotFoundError, StoreError
from agentlightning.types import FINISHED_ROLLOUT, EnqueueRolloutRequest, RolloutStatus

STATUS_SECONDS = 0.5


class Stopped(Exception):
    """The user asked to stop; rollouts that were under way are cancelled."""


async def run_rollouts(
    context: TrainingContext, requests: Sequence[EnqueueRolloutRequest], status: str
) -> list[Episode]:
    """Enqueue rollouts under the context's resources and return them finished, in the order of the requests.

    Raises Stopped when `context.stop` is set meanwhile.
    """
    if context.stop.is_set():
        raise Stopped
    resources_id = context.resources.resources_id if context.resources else None
    bound = [r.model_copy(update={"resources_id": r.resources_id or resources_id}) for r in requests]
    rollouts = await context.store.enqueue_many_rollouts(bound)
    ids = [r.rollout_id for r in rollouts]
    waiting = asyncio.create_task(context.store.wait_for_rollouts(rollout_ids=ids, timeout=None))
    stopping = asyncio.create_task(context.stop.wait())
    ticker = asyncio.create_task(_tick(context, len(ids), status))
    try:
        await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            await _cancel(context, ids)
            raise Stopped
        await waiting
    except asyncio.CancelledError:
        await _cancel(context, ids)
        raise
    finally:
        for task in (waiting, stopping, ticker):
            task.cancel()
        await asyncio.gather(waiting, stopping, ticker, return_exceptions=True)
    return await collect(context.store, ids)


async def _tick(context: TrainingContext, total: int, status: str) -> None:
    """Show how many rollouts are done. The counters are the store's, so this costs one small read."""
    before = await _finished(context)
    while True:
        context.reporter.status(f"{status} {await _finished(context) - before}/{total} rollouts")
        await asyncio.sleep(STATUS_SECONDS)


async def _finished(context: TrainingContext) -> int:
    counts = (await context.store.statistics())["rollouts"]
    return sum(counts.get(status, 0) for status in FINISHED_ROLLOUT)


async def _cancel(context: TrainingContext, rollout_ids: Sequence[str]) -> None:
    for rollout_id in rollout_ids:
        try:
            await context.store.update_rollout(rollout_id, status=RolloutStatus.CANCELLED)
        except NotFoundError:
            raise
        except StoreError:
            continue  # it finished just now
