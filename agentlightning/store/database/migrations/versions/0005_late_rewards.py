"""The last rewards of an ended attempt, as a column, so that its spans are not read again for each that comes late."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("attempts", sa.Column("rewards", sa.Text(), nullable=True))


def downgrade() -> None:
    op.drop_column("attempts", "rewards")
