"""Which tokens a filter left to draw a segment's tokens from, as a column."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("segments", sa.Column("kept", sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column("segments", "kept")
