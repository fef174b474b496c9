"""`.ci/run`: what takes turns there leaves no environment, no part of the slow suite and no training out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from scripts.clients import AGENTS, ENVIRONMENTS

ROOT = Path(__file__).parents[2]
TURNS = re.findall(r'^    "([^|"]+)\|([\w-]+)\|([^|"]*)', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)


def test_every_turn_is_a_target_of_make() -> None:
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {target for _, target, _ in TURNS} <= set(targets)
    assert len({name for name, _, _ in TURNS}) == len(TURNS) > 20


def test_every_environment_of_the_frameworks_has_its_turn() -> None:
    turns = [arguments for _, target, arguments in TURNS if target == "test-clients" and "--slow" not in arguments]
    assert sorted(turns) == sorted(f"--only {name}" for name in ENVIRONMENTS)


def test_every_part_of_the_slow_suite_has_its_turn() -> None:
    parts = [arguments.rpartition(" ")[2] for _, target, arguments in TURNS if target == "test-slow"]
    assert sorted(parts) == [f"{i + 1}/{len(parts)}" for i in range(len(parts))]


def test_every_benchmark_has_its_turn() -> None:
    parts = re.findall(r'^    "bench [^|]+\|bench\|\|PART=(\d/\d)"', (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    run = [
        line
        for part in parts
        for line in subprocess.run(
            ["make", "--dry-run", "bench", f"PART={part}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.splitlines()
        if "awk" in line
    ]
    shown = [re.sub(r"; do .*", "; do echo $script; done", line.strip()) for line in run]
    found = [
        name for line in shown for name in subprocess.check_output(["sh", "-c", line], cwd=ROOT, text=True).split()
    ]
    assert sorted(found) == sorted(str(file.relative_to(ROOT)) for file in (ROOT / "benchmarks").glob("[a-z]*.py"))


def test_every_example_that_is_trained_for_long_has_its_turn() -> None:
    """In an environment in which its tests are chosen."""
    files = {f.stem for f in (ROOT / "tests" / "clients").glob("test_*.py") if "pytest.mark.slow" in f.read_text()}
    turns = [a for _, target, a in TURNS if target == "test-clients" and "--slow" in a]
    chosen = {a.rpartition(" ")[2]: a.split("--only ")[1].split()[0] for a in turns}
    assert files <= set(chosen)
    for file, environment in chosen.items():
        agents = AGENTS.get(environment) or file
        assert any(agent in file for agent in agents.split(" or ")), (file, environment)


def test_no_test_ends_before_what_it_waits_for() -> None:
    """A command that may take longer than its test says nothing of why: the test must be given more time than it."""
    by_default = int(re.findall(r"^timeout = (\d+)", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0])
    for file in (ROOT / "tests").rglob("*.py"):
        words = file.read_text()
        waits = [int(seconds) for seconds in re.findall(r"\btimeout=(\d+)", words)]
        given = [int(seconds) for seconds in re.findall(r"mark\.timeout\((\d+)", words)] or [by_default]
        assert max(waits, default=0) <= max(given), file


def test_folders_of_tests_are_removed() -> None:
    """A folder that outlives its test costs a gigabyte here and there, and fills the disk in a week."""
    made = {
        path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py") if "mkdtemp(" in path.read_text()
    }
    removed = {path for path in made if "shutil.rmtree" in (ROOT / path).read_text()}
    assert not made - removed, "use tests.temporary.shared_folder"
    assert "tests/temporary.py" in removed
