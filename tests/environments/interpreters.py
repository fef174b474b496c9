"""Interpreters with other people's packages, each made once for all tests of a process."""

from __future__ import annotations

import os
import subprocess
from functools import cache

import pytest

from tests.temporary import shared_folder


@cache
def interpreter(variable: str, packages: tuple[str, ...], bases: tuple[str, ...]) -> str:
    """The one that a variable names, or a new one with these packages, made by the first of `bases` that runs. Skips
    where there is none."""
    if named := os.environ.get(variable):
        return named
    base = next((one for one in bases if subprocess.run([one, "-c", ""], check=False).returncode == 0), None)
    if base is None:
        pytest.skip(f"there is no Python here that {packages[0]} takes")
    folder = shared_folder("agl-interpreter-")
    subprocess.run([base, "-m", "venv", folder], check=True)
    python = f"{folder}/bin/python"
    subprocess.run(
        [python, "-m", "pip", "install", "-qq", *os.environ.get("PIP_ARGS", "").split(), *packages], check=True
    )
    return python
