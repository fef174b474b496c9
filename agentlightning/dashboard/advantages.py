"""What the calls of a rollout were worth in training: computed again from the rewards in the store, as the run's own
settings say, over the rollouts of the same step. Nothing is guessed: where that cannot be done, the reason is told.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from agentlightning.algorithm.credit.assignment import credit
from agentlightning.algorithm.credit.modes import CREDIT_MODES
from agentlightning.algorithm.credit.units import OUTCOME_USE, CreditRule, state_values
from agentlightning.algorithm.episode import collect
from agentlightning.errors import AgentLightningError
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Outcome, Rollout, Run
from agentlightning.types.recording import FORK_OF

MOST_ROLLOUTS = 1024
"""Of a step; in larger ones only siblings are compared."""


class Worth(NamedTuple):
    """Advantages of sampled tokens by call id (those that are not there have none: masked, or siblings that earned the
    same), or why they are not known."""

    by_call: dict[str, list[float]]
    reason: str | None


async def advantages_of(store: SqlLightningStore, rollout: Rollout) -> Worth:
    """Of the calls of a rollout and of all that were compared with it."""
    run = await store.get_run_by_id(rollout.run_id) if rollout.run_id else None
    step, group = rollout.metadata.get("step"), rollout.metadata.get("group")
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
        found = await store.list_rollouts(**scope, step_in=[step], limit=MOST_ROLLOUTS + 1)
        if len(found) <= MOST_ROLLOUTS:
            return [one.rollout_id for one in found]
    return [one.rollout_id for one in await store.list_rollouts(**scope, group_in=[group], limit=MOST_ROLLOUTS)]


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
    except (AgentLightningError, ValueError, TypeError):
        return "The run's own way of credit is not known here."
    return rule
