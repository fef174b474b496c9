"""What the page of a group shows: siblings, what they earned, what their calls were worth in training, and where they
part from the best one.

What calls were worth is computed again from the rewards in the store, by the run's own settings, over the rollouts of
the same step. Nothing is guessed: where that cannot be done, the page gives the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any, NamedTuple

from starlette.requests import Request

from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.modes import CREDIT_MODES
from agentlightning.algorithm.credit.units import OUTCOME_USE, CreditRule, state_values
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.dashboard.rollouts import run_name
from agentlightning.dashboard.texts import Texts, shown, texts_of
from agentlightning.errors import AgentLightningError, NotFoundError
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Outcome, Rollout, Run
from agentlightning.types.recording import FORK_OF

MOST_SIBLINGS = 256
AROUND = 24
"""Tokens that are shown on each side of where two siblings part."""


async def of_rollout(store: SqlLightningStore, request: Request) -> Any:
    """The group of a rollout; one without siblings is alone in it. `other` is the one to compare it with."""
    rollout = await store.get_rollout_by_id(request.path_params["rollout_id"])
    if rollout is None:
        raise NotFoundError("There is no such rollout in this store: it may have been pruned.")
    group = rollout.group
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
        "step": rollout.step,
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


_MOST_ROLLOUTS = 1024
"""Of a step; in larger ones only siblings are compared."""


class Worth(NamedTuple):
    """Advantages of sampled tokens by call id (those that are not there have none: masked, or siblings that earned the
    same), or why they are not known."""

    by_call: dict[str, list[float]]
    reason: str | None


async def advantages_of(store: SqlLightningStore, rollout: Rollout) -> Worth:
    """Of the calls of a rollout and of all that were compared with it."""
    run = await store.get_run_by_id(rollout.run_id) if rollout.run_id else None
    step, group = rollout.step, rollout.group
    if run is None or group is None or rollout.mode == "val":
        return Worth({}, "It was not trained on.")
    rule = _rule(run)
    if isinstance(rule, str):
        return Worth({}, rule)
    ids = await _compared(store, rollout.run_id or "", step, str(group))
    try:
        episodes = [e for e in await collect(store, ids) if FORK_OF not in e.rollout.metadata]
        batches = credit(episodes, rule, values=state_values(episodes))
    except AgentLightningError as error:  # also where numpy is not installed
        return Worth({}, str(error))
    return Worth({c.call.info.call_id: c.advantages.tolist() for batch in batches for c in batch}, None)


async def _compared(store: SqlLightningStore, run_id: str, step: Any, group: str) -> list[str]:
    """The finished rollouts of the step, or of the group alone where the step has too many."""
    scope: dict[str, Any] = {"run_id_in": [run_id], "status_in": ["succeeded", "failed"], "mode_in": ["train"]}
    if isinstance(step, int):
        found = await store.list_rollouts(**scope, step_in=[step], limit=_MOST_ROLLOUTS + 1)
        if len(found) <= _MOST_ROLLOUTS:
            return [one.rollout_id for one in found]
    return [one.rollout_id for one in await store.list_rollouts(**scope, group_in=[group], limit=_MOST_ROLLOUTS)]


def _rule(run: Run) -> CreditRule | str:
    """The run's rule, or why there is none."""
    settings = run.settings
    if "advantage" not in settings:
        return f"{run.algorithm} compares no siblings."
    mode, advantage = str(settings.get("credit", "broadcast")), settings["advantage"]
    if mode not in CREDIT_MODES or not CREDIT_MODES[mode].compares:
        return "They came from a critic or a teacher, whose numbers are not recorded."
    if settings.get("baseline", "none") != "none":
        return "A baseline of earlier steps was subtracted, which is not recorded."
    try:
        rule = CreditRule(
            mode=mode,
            advantage=advantage,
            gamma=float(settings.get("gamma", 1.0)),
            lam=float(settings.get("lam", 1.0)),
            total=settings.get("rollout_return") == "sum",
            keep_flat=True,
            uses={**OUTCOME_USE, **{Outcome(name): use for name, use in settings.get("outcome_use", {}).items()}},
        )
        _ = rule.estimator
    except (AgentLightningError, ValueError, TypeError, OverflowError, AttributeError):  # of settings that are no such
        return "The run's own way of credit is not known here."
    return rule
