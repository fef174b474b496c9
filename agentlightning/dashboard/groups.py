"""What the page of a group shows: siblings, what they earned and were worth, and where they part from the best one."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from starlette.requests import Request

from agentlightning.algorithm.episode import Episode, collect
from agentlightning.dashboard.advantages import Worth, advantages_of
from agentlightning.dashboard.plain import shown
from agentlightning.dashboard.rollouts import run_name
from agentlightning.dashboard.texts import Texts, texts_of
from agentlightning.errors import NotFoundError
from agentlightning.store.sql import SqlLightningStore

MOST_SIBLINGS = 256
AROUND = 24
"""Tokens that are shown on each side of where two siblings part."""


async def of_rollout(store: SqlLightningStore, request: Request) -> Any:
    """The group of a rollout; one without siblings is alone in it. `other` is whom to compare it with."""
    rollout = await store.get_rollout_by_id(request.path_params["rollout_id"])
    if rollout is None:
        raise NotFoundError("There is no such rollout in this store: it may have been pruned.")
    group = rollout.metadata.get("group")
    ids = [rollout.rollout_id]
    if group is not None and rollout.run_id is not None:
        found = await store.list_rollouts(run_id_in=[rollout.run_id], group_in=[str(group)], limit=MOST_SIBLINGS)
        ids = [one.rollout_id for one in found]
    episodes = await collect(store, ids)
    worth = await advantages_of(store, rollout)
    texts, _ = await texts_of(store, rollout.run_id)
    known = sorted((e for e in episodes if e.reward is not None), key=lambda e: e.reward or 0.0)
    worst = known[0] if known else None
    best = next((e for e in known if e.reward == known[-1].reward), None)  # of equals the one that stands first
    return {
        "group": group,
        "step": rollout.metadata.get("step"),
        "run_id": rollout.run_id,
        "run_name": await run_name(store, rollout.run_id),
        "task": shown(rollout.input),
        "advantages": worth.reason,
        "siblings": [_sibling(episode, worth) for episode in episodes],
        "best": best and best.rollout.rollout_id,
        "worst": worst and worst.rollout.rollout_id,
        "partings": {
            e.rollout.rollout_id: parting(best, e, texts) for e in episodes if best is not None and e is not best
        },
    }


def _sibling(episode: Episode, worth: Worth) -> dict[str, Any]:
    values = [advantage for call in episode.calls for advantage in worth.by_call.get(call.info.call_id, ())]
    return {
        "rollout_id": episode.rollout.rollout_id,
        "status": episode.rollout.status,
        "reward": episode.reward,
        "outcome": episode.attempt.outcome if episode.attempt else None,
        "advantage": fmean(values) if values else None,
        "calls": len(episode.calls),
        "tokens": episode.sampled_tokens,
        "seconds": _seconds(episode),
    }


def _seconds(episode: Episode) -> float | None:
    attempt = episode.attempt
    return None if attempt is None or attempt.end_time is None else attempt.end_time - attempt.start_time


def parting(one: Episode, other: Episode, texts: Texts | None) -> dict[str, Any] | None:
    """The first sampled token where two siblings part: what they share before it, and how each goes on.

    Calls are compared in their order; None where one of them sampled nothing, or they are the same to the end.
    """
    for number, (a, b) in enumerate(zip(one.calls, other.calls, strict=False)):
        if a.prompt_ids.tolist() != b.prompt_ids.tolist():
            return {"call": number, "position": 0, "in_prompt": True, "before": [], "one": [], "other": []}
        left, right = a.response_ids.tolist(), b.response_ids.tolist()
        at = first_difference(left, right)
        if at is not None:
            return {
                "call": number,
                "position": at,
                "in_prompt": False,
                "before": _texts(left[max(0, at - AROUND) : at], texts),
                "one": _texts(left[at : at + AROUND], texts),
                "other": _texts(right[at : at + AROUND], texts),
            }
    return None


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Where two sequences part; None if they are the same. One that is the beginning of the other parts at its end."""
    at = next((n for n, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    return None if at == len(a) == len(b) else at


def _texts(ids: Sequence[int], texts: Texts | None) -> Sequence[str]:
    return [f"⟨{token}⟩" for token in ids] if texts is None else texts(ids)
