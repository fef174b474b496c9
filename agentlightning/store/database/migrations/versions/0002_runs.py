"""Runs: a run and what it measured and said are rows; a rollout knows the run it belongs to."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_IN_A_RUN = "run_id IS NOT NULL"
_QUEUED_IN_A_RUN = "available_at IS NOT NULL AND run_id IS NOT NULL"


def upgrade() -> None:
    op.add_column("rollouts", sa.Column("run_id", sa.Text(), nullable=True))
    for name, columns, where in (
        ("rollouts_run", ["run_id", "seq"], _IN_A_RUN),
        ("rollouts_run_queue", ["run_id", "available_at", "seq"], _QUEUED_IN_A_RUN),
    ):
        op.create_index(name, "rollouts", columns, sqlite_where=sa.text(where), postgresql_where=sa.text(where))
    op.create_table(
        "runs",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("algorithm", sa.Text(), nullable=False),
        sa.Column("agent", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("settings", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("runs_id", "runs", ["run_id"], unique=True)
    op.create_table(
        "run_events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("event_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("time", sa.Double(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=True),
        sa.Column("data", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("run_events_id", "run_events", ["run_id", "event_id"], unique=True)


def downgrade() -> None:
    op.drop_table("run_events")
    op.drop_table("runs")
    op.drop_index("rollouts_run_queue", "rollouts")
    op.drop_index("rollouts_run", "rollouts")
    op.drop_column("rollouts", "run_id")
