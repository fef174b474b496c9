"""The page for those who come from 0.3 has the tables of the code."""

from __future__ import annotations

from pathlib import Path

from agentlightning.compat.page import tables, written
from agentlightning.compat.table import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "from-0.3.md"


def test_the_page_has_the_tables_of_the_code() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "make it anew: python -m agentlightning.compat.page docs/from-0.3.md"
    assert all(f"<!-- table {name} -->" in page for name in tables())
    assert [old.name for old in TABLE if f"`{old.name.replace(':', '.')}`" not in page] == []
