"""The first schema"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "attempts",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("sequence_id", sa.Integer(), nullable=False),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("last_heartbeat_time", sa.Double(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=True),
        sa.Column("next_span", sa.Integer(), nullable=False),
        sa.Column("lease", sa.Double(), nullable=False),
        sa.Column("timeout_at", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index(
        "attempts_deadline",
        "attempts",
        ["deadline"],
        sqlite_where=sa.text("deadline IS NOT NULL"),
        postgresql_where=sa.text("deadline IS NOT NULL"),
    )
    op.create_index("attempts_id", "attempts", ["attempt_id"], unique=True)
    op.create_index("attempts_rollout", "attempts", ["rollout_id", "sequence_id"], unique=True)
    op.create_index(
        "attempts_worker",
        "attempts",
        ["worker_id"],
        sqlite_where=sa.text("deadline IS NOT NULL"),
        postgresql_where=sa.text("deadline IS NOT NULL"),
    )
    op.create_table(
        "calls",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("call_id", sa.Text(), nullable=False),
        sa.Column("prompt_segment_id", sa.Text(), nullable=False),
        sa.Column("response_segment_id", sa.Text(), nullable=False),
        sa.Column("info", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("calls_id", "calls", ["rollout_id", "attempt_id", "call_id"], unique=True)
    op.create_table(
        "counters",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("shard", sa.Text(), nullable=False),
        sa.Column("value", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "shard"),
    )
    op.create_table(
        "resources",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("resources_id", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("create_time", sa.Double(), nullable=False),
        sa.Column("update_time", sa.Double(), nullable=False),
        sa.Column("resources", sa.Text(), nullable=False),
        sa.Column("revision", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("resources_key", "resources", ["resources_id"], unique=True)
    op.create_index("resources_revision", "resources", ["revision"])
    op.create_table(
        "rollouts",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("input", sa.Text(), nullable=False),
        sa.Column("mode", sa.Text(), nullable=True),
        sa.Column("resources_id", sa.Text(), nullable=True),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("config", sa.Text(), nullable=True),
        sa.Column("metadata", sa.Text(), nullable=True),
        sa.Column("start_time", sa.Double(), nullable=False),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("available_at", sa.Double(), nullable=True),
        sa.Column("attempts", sa.Integer(), nullable=False),
        sa.Column("latest_attempt_id", sa.Text(), nullable=True),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("infra_failures", sa.Integer(), nullable=False),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("rollouts_id", "rollouts", ["rollout_id"], unique=True)
    op.create_index(
        "rollouts_queue",
        "rollouts",
        ["available_at", "seq"],
        sqlite_where=sa.text("available_at IS NOT NULL"),
        postgresql_where=sa.text("available_at IS NOT NULL"),
    )
    op.create_index("rollouts_status", "rollouts", ["status", "seq"])
    op.create_table(
        "segments",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("segment_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("parent_keep", sa.Integer(), nullable=False),
        sa.Column("ids", sa.LargeBinary(), nullable=False),
        sa.Column("logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("plain_logprobs", sa.LargeBinary(), nullable=True),
        sa.Column("versions", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("segments_id", "segments", ["attempt_id", "segment_id"], unique=True)
    op.create_table(
        "spans",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("rollout_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("span_id", sa.Text(), nullable=False),
        sa.Column("sequence_id", sa.Integer(), nullable=False),
        sa.Column("trace_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("start_time", sa.Double(), nullable=True),
        sa.Column("end_time", sa.Double(), nullable=True),
        sa.Column("attributes", sa.Text(), nullable=False),
        sa.Column("rest", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("spans_id", "spans", ["rollout_id", "attempt_id", "span_id"], unique=True)
    op.create_table(
        "workers",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("status", sa.Text(), nullable=False),
        sa.Column("heartbeat_stats", sa.Text(), nullable=True),
        sa.Column("last_heartbeat_time", sa.Double(), nullable=True),
        sa.Column("last_dequeue_time", sa.Double(), nullable=True),
        sa.Column("last_busy_time", sa.Double(), nullable=True),
        sa.Column("last_idle_time", sa.Double(), nullable=True),
        sa.Column("current_rollout_id", sa.Text(), nullable=True),
        sa.Column("current_attempt_id", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("seq"),
    )
    op.create_index("workers_id", "workers", ["worker_id"], unique=True)


def downgrade() -> None:
    for table in ("attempts", "calls", "counters", "resources", "rollouts", "segments", "spans", "workers"):
        op.drop_table(table)
