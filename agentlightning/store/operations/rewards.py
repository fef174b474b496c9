"""What an ended attempt earned, written to its rollout so that rollouts are found by it; spans stay the truth.

An attempt's spans are read once, when it ends. What comes later is added to what was found then, so that a late span
costs as much as it says, however many there were before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from sqlalchemy import bindparam, or_, select, update

from agentlightning.store.database.schema import attempts, calls, rollouts, runs, spans
from agentlightning.store.database.transaction import Statement, Transaction
from agentlightning.store.operations.codec import decode, encode
from agentlightning.types.names import REWARD
from agentlightning.types.reward import (
    AGENTOPS_OUTPUTS,
    LastRewards,
    callers_of,
    given_reward,
    has_parts,
    in_one_form,
    weights_in,
)

_KEYS = {"holding": f"{REWARD}.0.value", "task": AGENTOPS_OUTPUTS[0], "entity": AGENTOPS_OUTPUTS[1]}
_reward_spans = Statement(
    select(spans.c.sequence_id, spans.c.name, spans.c.attributes)
    .where(
        spans.c.rollout_id == bindparam("rollout"),
        spans.c.attempt_id == bindparam("attempt"),
        or_(
            spans.c.name == bindparam("named"),
            *(spans.c.attributes.contains(bindparam(which)) for which in _KEYS),
        ),
    )
    .order_by(spans.c.sequence_id, spans.c.seq)
)
_select_rewards = Statement(select(attempts.c.rewards).where(attempts.c.attempt_id == bindparam("attempt")))
_update_rewards = Statement(update(attempts).where(attempts.c.attempt_id == bindparam("attempt")), ["rewards"])
_update_reward = Statement(
    update(rollouts).where(
        rollouts.c.rollout_id == bindparam("rollout"), rollouts.c.latest_attempt_id == bindparam("attempt")
    ),
    ["reward"],
)
_select_infos = Statement(
    select(calls.c.info).where(calls.c.rollout_id == bindparam("rollout"), calls.c.attempt_id == bindparam("attempt"))
)
_select_settings = Statement(
    select(runs.c.settings).where(
        runs.c.run_id
        == select(rollouts.c.run_id).where(rollouts.c.rollout_id == bindparam("rollout")).scalar_subquery()
    )
)


def note(tx: Transaction, attempt_id: str, rollout_id: str, otherwise: float | None = None) -> None:
    """Of an attempt that ends. `otherwise`: what one earned that no span rewards."""
    found = tx.rows(_reward_spans, {"rollout": rollout_id, "attempt": attempt_id, "named": REWARD, **_KEYS})
    reward = _add(tx, attempt_id, rollout_id, LastRewards(), found) if found else None
    _write(tx, attempt_id, rollout_id, otherwise if reward is None else reward)


def note_late(tx: Transaction, attempt_id: str, rollout_id: str, spans: Iterable[Mapping[str, Any]]) -> None:
    """Of spans, given as columns, that came after their attempt's end."""
    rewarding = [
        (span["sequence_id"], span["name"], span["attributes"])
        for span in spans
        if span["name"] == REWARD or any(key in span["attributes"] for key in _KEYS.values())
    ]
    if not rewarding:
        return
    row = tx.row(_select_rewards, {"attempt": attempt_id})
    if row is None or row[0] is None:  # none was known, or it ended before these were kept
        note(tx, attempt_id, rollout_id)
    else:
        last = decode(row[0], "attempts.rewards", attempt_id, type=LastRewards)
        _write(tx, attempt_id, rollout_id, _add(tx, attempt_id, rollout_id, last, rewarding))


def _add(tx: Transaction, attempt_id: str, rollout_id: str, last: LastRewards, spans: Iterable[Any]) -> float | None:
    """Keep what is last now; what the attempt earned by it. Weights and callers are looked up where they matter."""
    found = [
        (sequence_id, in_one_form(name, decode(attributes, "spans.attributes", attempt_id, type=dict[str, Any])))
        for sequence_id, name, attributes in spans
    ]
    weights = _weights(tx, rollout_id) if any(has_parts(attributes) for _, attributes in found) else {}
    for sequence_id, attributes in found:
        if (given := given_reward(attributes, weights)) is not None:
            last.add(sequence_id, given)
    if last.callers is None and last.names_agents():
        rows = tx.rows(_select_infos, {"rollout": rollout_id, "attempt": attempt_id})
        infos = [decode(row[0], "calls.info", rollout_id, type=dict[str, Any]) for row in rows]
        last.know(callers_of((info[who], info["trained"]) for info in infos for who in ("agent", "policy")))
    tx.run(_update_rewards, {"attempt": attempt_id, "rewards": encode(asdict(last))})
    return last.final()


def _weights(tx: Transaction, rollout_id: str) -> Mapping[str, float]:
    """By which the rollout's run adds up the parts of a reward."""
    row = tx.row(_select_settings, {"rollout": rollout_id})
    return {} if row is None else weights_in(decode(row[0], "runs.settings", rollout_id, type=dict[str, Any]))


def _write(tx: Transaction, attempt_id: str, rollout_id: str, reward: float | None) -> None:
    if reward is not None:
        tx.run(_update_reward, {"rollout": rollout_id, "attempt": attempt_id, "reward": reward})
