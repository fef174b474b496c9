"""What rollouts are found by: step and group of their metadata, and the reward of their latest attempt, as columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

import sqlalchemy as sa
from alembic import op

from agentlightning.types.reward import final_of

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

BATCH = 1000
_INDEXES = (("rollouts_run_step", "step"), ("rollouts_run_reward", "reward"))


def upgrade() -> None:
    for name, kind in (("step", sa.Integer()), ("group_id", sa.Text()), ("reward", sa.Double())):
        op.add_column("rollouts", sa.Column(name, kind, nullable=True))
    bind = op.get_bind()
    _fill(bind, "UPDATE rollouts SET step = :step, group_id = :group_id WHERE seq = :seq", _places(bind))
    _fill(bind, "UPDATE rollouts SET reward = :reward WHERE latest_attempt_id = :attempt", _rewards(bind))
    for name, column in _INDEXES:
        where = sa.text(f"{column} IS NOT NULL")
        op.create_index(name, "rollouts", ["run_id", column, "seq"], sqlite_where=where, postgresql_where=where)


def _fill(bind: sa.Connection, update: str, rows: Iterator[dict[str, Any]]) -> None:
    batch = list(rows)
    for start in range(0, len(batch), BATCH):
        bind.execute(sa.text(update), batch[start : start + BATCH])


def _places(bind: sa.Connection) -> Iterator[dict[str, Any]]:
    for seq, metadata in bind.execute(sa.text("SELECT seq, metadata FROM rollouts WHERE metadata IS NOT NULL")):
        known = json.loads(metadata)
        step, group = known.get("step"), known.get("group")
        whole = isinstance(step, int) and not isinstance(step, bool) and abs(step) < 2**31
        if whole or group is not None:
            yield {"seq": seq, "step": step if whole else None, "group_id": None if group is None else str(group)}


def _rewards(bind: sa.Connection) -> Iterator[dict[str, Any]]:
    found = bind.execute(
        sa.text(
            "SELECT s.attempt_id, s.attributes FROM spans s JOIN rollouts r ON r.latest_attempt_id = s.attempt_id "
            "WHERE r.end_time IS NOT NULL AND s.attributes LIKE '%agentlightning.reward.0.value%' "
            "ORDER BY s.attempt_id, s.sequence_id, s.seq"
        )
    )
    for attempt, rows in groupby(found, key=lambda row: row[0]):
        reward = final_of(json.loads(attributes) for _, attributes in rows)
        if reward is not None:
            yield {"attempt": attempt, "reward": reward}


def downgrade() -> None:
    for name, _ in _INDEXES:
        op.drop_index(name, "rollouts")
    for name in ("reward", "group_id", "step"):
        op.drop_column("rollouts", name)
