"""What calls of forks have in common with those they are of, by columns and indexes that name where it is."""

from __future__ import annotations

import json
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_TEXTS = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions")


def upgrade() -> None:
    op.add_column("spans", sa.Column("texts", sa.Text(), nullable=True))
    for table, row in (("spans", "source_span"), ("segments", "source_segment")):
        op.add_column(table, sa.Column("source_attempt", sa.Text(), nullable=True))
        op.add_column(table, sa.Column(row, sa.Text(), nullable=True))
        has_source = sa.text("source_attempt IS NOT NULL")
        columns = ["source_attempt", row, "seq"]
        op.create_index(f"{table}_source", table, columns, sqlite_where=has_source, postgresql_where=has_source)


def downgrade() -> None:
    _give_back_tokens()
    _give_back_texts()
    for table, row in (("spans", "source_span"), ("segments", "source_segment")):
        op.drop_index(f"{table}_source", table)
        op.drop_column(table, row)
        op.drop_column(table, "source_attempt")
    op.drop_column("spans", "texts")


def _give_back_tokens() -> None:
    """Store the tokens of every segment with it again."""
    tokens = ", ".join(f"{name} = ({_held(name)})" for name in ("ids", "logprobs", "plain_logprobs"))
    op.execute(f"UPDATE segments SET {tokens} WHERE source_attempt IS NOT NULL AND length(ids) = 0")


def _held(column: str) -> str:
    own = "s.source_attempt = segments.source_attempt AND s.source_segment = segments.source_segment"
    named = "s.attempt_id = segments.source_attempt AND s.segment_id = segments.source_segment"
    holder = f"SELECT s.{column} FROM segments s WHERE {own} AND length(s.ids) > 0 ORDER BY s.seq LIMIT 1"
    return f"SELECT COALESCE(({holder}), (SELECT s.{column} FROM segments s WHERE {named}))"


def _give_back_texts() -> None:
    """Put the texts of every span among its attributes again."""
    database = op.get_bind()
    apart = sa.text(
        "SELECT seq, attributes, texts, source_attempt, source_span FROM spans "
        "WHERE texts IS NOT NULL OR source_attempt IS NOT NULL"
    )
    whole = sa.text("UPDATE spans SET attributes = :attributes WHERE seq = :seq")
    for seq, attributes, texts, attempt, span in database.execute(apart).fetchall():
        more = _texts_of(attempt, span) if texts is None else json.loads(texts)
        text = json.dumps(json.loads(attributes) | more, ensure_ascii=False, separators=(",", ":"))
        database.execute(whole, {"attributes": text, "seq": seq})


def _texts_of(attempt: str, span: str) -> dict[str, Any]:
    given = {"attempt": attempt, "span": span}
    held = sa.text(
        "SELECT texts FROM spans WHERE source_attempt = :attempt AND source_span = :span AND texts IS NOT NULL "
        "ORDER BY seq LIMIT 1"
    )
    if (row := op.get_bind().execute(held, given).fetchone()) is not None:
        return json.loads(row[0])
    named = sa.text(
        "SELECT attributes FROM spans WHERE attempt_id = :attempt AND span_id = :span "
        "AND rollout_id = (SELECT rollout_id FROM attempts WHERE attempt_id = :attempt)"
    )
    row = op.get_bind().execute(named, given).fetchone()
    return {} if row is None else {name: value for name, value in json.loads(row[0]).items() if name in _TEXTS}
