"""Prompts are tuned with nothing but the core package and an API endpoint, in a fresh environment."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIP = ("-m", "pip", "--disable-pip-version-check", "-qq")
HEAVY = "import importlib.util as i; print([n for n in ('torch', 'transformers', 'openai') if i.find_spec(n)])"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


def done(*command: str, cwd: Path) -> str:
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-3000:]
    return ran.stdout


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A folder with the example alone, and the python of an environment with the package's wheel."""
    folder = tmp_path_factory.mktemp("fresh")
    tried = subprocess.run(
        [sys.executable, *PIP, "download", "--no-deps", "-d", str(folder / "pip"), "gepa"], check=False
    )
    if tried.returncode:
        pytest.skip("pip cannot download packages here")
    done(sys.executable, *PIP, "wheel", "--no-deps", "-w", str(folder / "dist"), str(ROOT), cwd=folder)
    done(sys.executable, "-m", "venv", str(folder / "env"), cwd=folder)
    python = str(folder / "env" / "bin" / "python")
    done(python, *PIP, "install", str(next((folder / "dist").glob("*.whl"))), "gepa", cwd=folder)
    (folder / "examples").mkdir()
    (folder / "examples" / "__init__.py").touch()
    shutil.copytree(ROOT / "examples" / "room_booking", folder / "examples" / "room_booking")
    return folder, python


@pytest.mark.parametrize("algorithm", ["apo", "gepa"])
def test_the_example_finds_a_better_prompt(fresh: tuple[Path, str], algorithm: str) -> None:
    folder, python = fresh
    assert done(python, "-c", HEAVY, cwd=folder).strip() == "[]"
    where = done(python, "-c", "import agentlightning; print(agentlightning.__file__)", cwd=folder)
    assert Path(where.strip()).is_relative_to(folder), "the installed one, not the clone's"
    command = ["-m", "examples.room_booking.tune", "--algorithm", algorithm, "--run-dir", algorithm]
    done(python, *command, cwd=folder)
    rows = [json.loads(line) for line in (folder / algorithm / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["val_reward"] < 0.7
    assert rows[-1]["val_reward"] >= 0.8
    assert json.loads((folder / algorithm / "best" / "prompts.json").read_text())["promoted"]
