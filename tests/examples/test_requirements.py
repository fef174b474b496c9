"""What an example's requirements pin is what its tests run with, in the environments of `scripts/clients.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.clients import AGENTS, ENVIRONMENTS

ROOT = Path(__file__).parents[2]
TESTED = {
    "math/requirements.txt": ("openai3", "test_math.py"),
    "math/requirements-framework.txt": ("mcp2", "test_math.py"),
    "rag/requirements.txt": ("openai3", "test_rag.py"),
    "sql/requirements.txt": ("openai3", "test_sql.py"),
    "support/requirements.txt": ("tau2", "test_support.py"),
    "support/requirements-lab.txt": ("tau2", "test_lab_tau2.py"),
    "werewolf/requirements.txt": ("agentscope1", "test_werewolf.py"),
}
"""By file: the environment in which the example's test runs, and that test."""


def test_each_example_with_packages_is_tested_with_them() -> None:
    files = {file.relative_to(ROOT / "examples").as_posix() for file in ROOT.glob("examples/*/requirements*.txt")}
    assert files == set(TESTED)
    assert {test for _, test in TESTED.values() if not (ROOT / "tests" / "clients" / test).is_file()} == set()


@pytest.mark.parametrize("file", TESTED)
def test_pins_are_those_of_the_environment(file: str) -> None:
    lines = (line.partition("#")[0].strip() for line in (ROOT / "examples" / file).read_text().splitlines())
    pins = {line for line in lines if line}
    name, test = TESTED[file]
    assert {pin for pin in pins if "==" not in pin} == set()
    assert pins - {*ENVIRONMENTS[name]} == set()
    chosen = AGENTS.get(name, "test_").split(" or ")
    assert any(part in test for part in chosen), "is chosen in that environment"
