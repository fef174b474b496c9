"""Whole scripts for 0.3 with the frameworks that they use, where those are installed: they run as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from tests.compat.provider import serving

pytestmark = [pytest.mark.clients, pytest.mark.timeout(240)]

NEEDED = {
    "assistant": ("autogen-agentchat", "autogen-ext"),
    "library": ("openai-agents", "mcp"),
    "passages": ("openai-agents", "litellm", "mcp", "pandas", "pyarrow"),
    "graph": ("langgraph", "langchain", "langchain-openai"),
    "rooms": ("agentops", "openai"),
}
FOLDER = Path(__file__).parent / "scripts"


def test_each_script_says_what_it_needs() -> None:
    assert set(NEEDED) == {path.stem for path in FOLDER.glob("*.py")}


@pytest.mark.parametrize("script", NEEDED)
def test_a_script_runs_as_it_is(script: str, tmp_path: Path) -> None:
    try:
        for package in NEEDED[script]:
            version(package)
    except PackageNotFoundError as error:
        pytest.skip(f"not installed here: {error.name}")
    with serving() as provider:
        command = [sys.executable, str(FOLDER / f"{script}.py")]
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | provider, capture_output=True, text=True, timeout=200, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
