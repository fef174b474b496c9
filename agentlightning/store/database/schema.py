"""The store's tables: one schema for SQLite and PostgreSQL.

Statuses, JSON and ids are text, times are seconds since the epoch, tokens are binary. Work that waits for something
is found through columns that are NULL otherwise (`rollouts.available_at` while queued, `attempts.deadline` while
open), so that the indexes over them stay as small as the work in flight, however many finished rollouts there are.
A change here needs a migration in `migrations/versions`, and `HEAD` names the last one.
"""

from __future__ import annotations

from sqlalchemy import BigInteger, Column, Double, Index, Integer, LargeBinary, MetaData, Table, Text, and_

HEAD = "0006"

metadata = MetaData()


def _sequence() -> Column[int]:
    """Insertion order; SQLite's rowid."""
    return Column("seq", BigInteger().with_variant(Integer(), "sqlite"), primary_key=True, autoincrement=True)


rollouts = Table(
    "rollouts",
    metadata,
    _sequence(),
    Column("rollout_id", Text, nullable=False),
    Column("input", Text, nullable=False),
    Column("mode", Text),
    Column("resources_id", Text),
    Column("status", Text, nullable=False),
    Column("config", Text),  # NULL: the default one
    Column("metadata", Text),  # NULL: empty
    Column("start_time", Double, nullable=False),
    Column("end_time", Double),
    Column("available_at", Double),  # since when (or from when on) it may be claimed; NULL: not queued
    Column("attempts", Integer, nullable=False),
    Column("latest_attempt_id", Text),
    Column("failures", Integer, nullable=False),  # ended attempts that count against max_attempts
    Column("infra_failures", Integer, nullable=False),  # ended attempts that do not
    Column("run_id", Text),  # NULL: of no run
    Column("step", Integer),  # as in the metadata; NULL: of no step
    Column("group_id", Text),  # likewise
    Column("reward", Double),  # the latest attempt's, once it has ended; NULL: none
    Index("rollouts_id", "rollout_id", unique=True),
    Index("rollouts_status", "status", "seq"),
)
_QUEUED_IN_A_RUN = and_(rollouts.c.available_at.is_not(None), rollouts.c.run_id.is_not(None))
Index(
    "rollouts_queue",
    rollouts.c.available_at,
    rollouts.c.seq,
    sqlite_where=rollouts.c.available_at.is_not(None),
    postgresql_where=rollouts.c.available_at.is_not(None),
)
Index(
    "rollouts_run_queue",
    rollouts.c.run_id,
    rollouts.c.available_at,
    rollouts.c.seq,
    sqlite_where=_QUEUED_IN_A_RUN,
    postgresql_where=_QUEUED_IN_A_RUN,
)
Index(
    "rollouts_run",
    rollouts.c.run_id,
    rollouts.c.seq,
    sqlite_where=rollouts.c.run_id.is_not(None),
    postgresql_where=rollouts.c.run_id.is_not(None),
)
Index(
    "rollouts_run_step",
    rollouts.c.run_id,
    rollouts.c.step,
    rollouts.c.seq,
    sqlite_where=rollouts.c.step.is_not(None),
    postgresql_where=rollouts.c.step.is_not(None),
)
Index(
    "rollouts_run_reward",
    rollouts.c.run_id,
    rollouts.c.reward,
    rollouts.c.seq,
    sqlite_where=rollouts.c.reward.is_not(None),
    postgresql_where=rollouts.c.reward.is_not(None),
)

attempts = Table(
    "attempts",
    metadata,
    _sequence(),
    Column("attempt_id", Text, nullable=False),
    Column("rollout_id", Text, nullable=False),
    Column("sequence_id", Integer, nullable=False),
    Column("start_time", Double, nullable=False),
    Column("end_time", Double),
    Column("status", Text, nullable=False),
    Column("worker_id", Text),
    Column("last_heartbeat_time", Double),
    Column("outcome", Text),
    Column("error", Text),
    Column("metadata", Text),
    Column("next_span", Integer, nullable=False),  # the next span's sequence number
    Column("lease", Double, nullable=False),  # seconds without a heartbeat until it counts as unresponsive
    Column("timeout_at", Double, nullable=False),
    Column("deadline", Double),  # when the watchdog looks at it; NULL: it has ended
    Column("rewards", Text),  # once it has ended: the last ones, as JSON of LastRewards
    Index("attempts_id", "attempt_id", unique=True),
    Index("attempts_rollout", "rollout_id", "sequence_id", unique=True),
)
Index(
    "attempts_deadline",
    attempts.c.deadline,
    sqlite_where=attempts.c.deadline.is_not(None),
    postgresql_where=attempts.c.deadline.is_not(None),
)
Index(
    "attempts_worker",
    attempts.c.worker_id,
    sqlite_where=attempts.c.deadline.is_not(None),
    postgresql_where=attempts.c.deadline.is_not(None),
)

spans = Table(
    "spans",
    metadata,
    _sequence(),
    Column("rollout_id", Text, nullable=False),
    Column("attempt_id", Text, nullable=False),
    Column("span_id", Text, nullable=False),
    Column("sequence_id", Integer, nullable=False),
    Column("trace_id", Text, nullable=False),
    Column("parent_id", Text),
    Column("name", Text, nullable=False),
    Column("start_time", Double),
    Column("end_time", Double),
    Column("attributes", Text, nullable=False),
    Column("rest", Text),  # status, events, links, context, parent, resource, as far as they differ from the default
    Column("texts", Text),  # JSON of attributes that are kept apart, because others may have the same; see sharing
    Column("source_attempt", Text),  # the span that it has these from where `texts` is NULL
    Column("source_span", Text),
    Index("spans_id", "rollout_id", "attempt_id", "span_id", unique=True),
)

Index(
    "spans_source",
    spans.c.source_attempt,
    spans.c.source_span,
    spans.c.seq,
    sqlite_where=spans.c.source_attempt.is_not(None),
    postgresql_where=spans.c.source_attempt.is_not(None),
)

segments = Table(
    "segments",
    metadata,
    _sequence(),
    Column("attempt_id", Text, nullable=False),
    Column("segment_id", Text, nullable=False),
    Column("parent_id", Text),
    Column("parent_keep", Integer, nullable=False),
    Column("ids", LargeBinary, nullable=False),  # int32, little endian
    Column("logprobs", LargeBinary),  # float32, little endian
    Column("plain_logprobs", LargeBinary),
    Column("versions", Text),  # JSON [[start, version], …]
    Column("kept", LargeBinary),  # int32, little endian; see types.arrays
    Column("source_attempt", Text),  # the segment that it has its tokens from where `ids` are empty; see sharing
    Column("source_segment", Text),
    Index("segments_id", "attempt_id", "segment_id", unique=True),
)
Index(
    "segments_source",
    segments.c.source_attempt,
    segments.c.source_segment,
    segments.c.seq,
    sqlite_where=segments.c.source_attempt.is_not(None),
    postgresql_where=segments.c.source_attempt.is_not(None),
)

calls = Table(
    "calls",
    metadata,
    _sequence(),
    Column("rollout_id", Text, nullable=False),
    Column("attempt_id", Text, nullable=False),
    Column("call_id", Text, nullable=False),
    Column("prompt_segment_id", Text, nullable=False),
    Column("response_segment_id", Text, nullable=False),
    Column("info", Text, nullable=False),
    Index("calls_id", "rollout_id", "attempt_id", "call_id", unique=True),
)

resources = Table(
    "resources",
    metadata,
    _sequence(),
    Column("resources_id", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("create_time", Double, nullable=False),
    Column("update_time", Double, nullable=False),
    Column("resources", Text, nullable=False),
    Column("revision", Integer, nullable=False),  # the highest one is the latest of all resources
    Index("resources_key", "resources_id", unique=True),
    Index("resources_revision", "revision"),
)

workers = Table(
    "workers",
    metadata,
    _sequence(),
    Column("worker_id", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("heartbeat_stats", Text),
    Column("last_heartbeat_time", Double),
    Column("last_dequeue_time", Double),
    Column("last_busy_time", Double),
    Column("last_idle_time", Double),
    Column("current_rollout_id", Text),
    Column("current_attempt_id", Text),
    Index("workers_id", "worker_id", unique=True),
)

runs = Table(
    "runs",
    metadata,
    _sequence(),
    Column("run_id", Text, nullable=False),
    Column("algorithm", Text, nullable=False),
    Column("agent", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("settings", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("error", Text),
    Column("start_time", Double, nullable=False),
    Column("end_time", Double),
    Index("runs_id", "run_id", unique=True),
)

run_events = Table(
    "run_events",
    metadata,
    _sequence(),
    Column("run_id", Text, nullable=False),
    Column("event_id", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("time", Double, nullable=False),
    Column("step", Integer),  # NULL: of no step
    Column("data", Text, nullable=False),
    Index("run_events_id", "run_id", "event_id", unique=True),
)

counters = Table(
    "counters",
    metadata,
    Column("name", Text, primary_key=True),
    Column("shard", Text, primary_key=True),  # one per writing process, so that they never wait for each other
    Column("value", BigInteger, nullable=False),
)
