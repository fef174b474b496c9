"""`scripts/control.py` says of a script whether it runs, and if not why."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts.control import result_of, table


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import os; assert os.environ['OPENAI_BASE_URL'].endswith('/v1')", "runs"),
        ("import nothing_of_this_name", "ModuleNotFoundError: No module named 'nothing_of_this_name'"),
        ("raise SystemExit(3)", "ends without a word"),
    ],
)
def test_what_came_of_a_script(tmp_path: Path, text: str, said: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    assert result_of(Path(sys.executable), script) == said


def test_a_row_for_each_script() -> None:
    rows = table({"one": {"original": "runs", "ours": "runs"}}).splitlines()
    assert rows[2:] == ["| `one` | runs | runs |"]
