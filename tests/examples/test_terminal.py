"""The terminal example without Codex: its repositories, what is earned with them, and what is demonstrated.

`tests/clients/test_terminal.py` has the real Codex.
"""

from __future__ import annotations

import json
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from agentlightning.cli.configuration import make_algorithm
from agentlightning.errors import ConfigError
from examples.terminal import recipe
from examples.terminal.demonstrations import GIVEN_UP, MIXED, demonstrate, drawn, held_out
from examples.terminal.grading import LARGEST_FILE, left_behind, score
from examples.terminal.program import codex, install_command
from examples.terminal.repositories import SIZES, as_task, make_repository, make_tasks, make_tests
from examples.terminal.simulated import CHECK, change, run, shown_of

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_no_module_is_in_two_parts_and_each_can_be_mended() -> None:
    parts = make_tasks()
    assert {part: len(tasks) for part, tasks in parts.items()} == SIZES
    modules = [task["files"][task["module"]] for tasks in parts.values() for task in tasks]
    assert len({*modules}) == len(modules)
    assert make_tasks() == parts, "the same each time"
    assert "hidden" not in json.dumps([task["files"] for task in parts["val"]])


@pytest.mark.usefixtures("sandbox")
async def test_only_what_is_right_for_all_inputs_earns_anything() -> None:
    rng = random.Random(0)
    for _ in range(4):
        repository = make_repository(rng)
        task = as_task(repository, make_tests(repository, rng))
        at = repository.fault
        assert await score(repository.with_part(repository.right(at)).source(), task["hidden"]) == 1.0
        for part in repository.wrong(at):
            assert await score(repository.with_part(part).source(), task["hidden"]) == 0.0
        assert await score(None, task["hidden"]) == 0.0
        assert await score("import os", task["hidden"]) == 0.0


def test_the_visible_test_that_fails_is_that_of_the_fault(tmp_path: Path) -> None:
    """With the real check.py, which says what the simulated terminal says."""
    rng = random.Random(1)
    for n in range(4):
        repository, folder = make_repository(rng), tmp_path / str(n)
        tests = make_tests(repository, rng)
        task = as_task(repository, tests)
        folder.mkdir()
        for name, text in task["files"].items():
            (folder / name).write_text(text)
        assert ran(folder)[0].startswith(f"{repository.module}.{repository.functions[repository.fault].kind}(")
        value = str(tests[repository.fault][0][2])
        for part, said in ((repository.right(repository.fault), "All tests pass.\n"), (value, None)):
            (folder / task["module"]).write_text(repository.with_part(part).source())
            assert said is None or ran(folder) == (said, 0)


def ran(folder: Path) -> tuple[str, int]:
    command = [sys.executable, "-B", "check.py"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr, done.returncode


def test_simulated_commands_do_what_the_real_ones_do(tmp_path: Path) -> None:
    rng = random.Random(2)
    for _ in range(6):
        repository = make_repository(rng)
        module, source, at = f"{repository.module}.py", repository.source(), repository.fault
        function = repository.functions[at]
        (tmp_path / module).write_text(source)
        edit = change(module, function.part, repository.right(at))
        for command in (f"grep -A2 'def {function.kind}' {module}", edit):
            done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
            (said, code), source = run(command, module, source)
            assert (done.stdout, done.returncode) == (said, code)
        assert (tmp_path / module).read_text() == source == repository.with_part(repository.right(at)).source()
    assert shown_of("nothing", "here") == ("", 1)


def test_what_is_left_behind_is_a_file_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x = 1")
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "link.py").symlink_to(tmp_path / "secret")
    (workspace / "large.py").write_text("#" * (LARGEST_FILE + 1))
    (workspace / "bytes.py").write_bytes(b"\xff")
    (workspace / "folder.py").mkdir()
    (workspace / "good.py").write_text("x = 2")
    found = {
        name: left_behind(workspace, f"{name}.py") for name in ("link", "large", "bytes", "folder", "none", "good")
    }
    assert {name for name, text in found.items() if text is not None} == {"good"}
    assert left_behind(workspace, "../secret") is None


def test_no_held_out_module_is_demonstrated() -> None:
    assert len(held_out()) == SIZES["val"] + SIZES["test"]
    first = drawn(random.Random(0), ())
    assert drawn(random.Random(0), {first.source()}).source() != first.source()


def test_every_behaviour_is_demonstrated() -> None:
    rng = random.Random(0)
    shown = [demonstrate(rng, MIXED) for _ in range(400)]
    given_up = [d for d in shown if d.turns == (GIVEN_UP,)]
    others = [d for d in shown if d.turns != (GIVEN_UP,)]
    assert all(CHECK in d.turns[0] and "grep" in d.turns[1] for d in others)
    for d in others:
        old, new = d.turns[-1].removeprefix("I changed ").removesuffix(".").split(" to ")
        assert f"s/{old}/{new}/" in next(turn for turn in reversed(d.turns[:-1]) if "sed" in turn)
    unchecked = [d for d in others if "sed" in d.turns[-2]]
    failed = [d for d in others if "gives" in d.results[-1]]
    again = [d for d in others if sum("sed" in turn for turn in d.turns) > 1]
    assert min(len(given_up), len(unchecked), len(failed), len(again)) > 20


def test_without_codex_it_is_said_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"npm install .*--prefix .*codex-[\d.]+ @openai/codex@[\d.]+"):
        codex()


def test_the_readme_installs_codex_where_it_is_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_CACHE", raising=False)
    monkeypatch.setenv("HOME", "/home/reader")
    typed = shlex.join(install_command()).replace("/home/reader", "~")
    assert f"\n    {typed}\n" in (ROOT / "examples" / "terminal" / "README.md").read_text()


def test_the_files_of_settings_are_settings() -> None:
    yaml = pytest.importorskip("yaml")
    assert yaml.safe_load((ROOT / "examples" / "terminal" / "config.yaml").read_text()) == recipe.SETTINGS
    algorithm = make_algorithm(None, None, ROOT / "examples" / "terminal" / "config.gpu.yaml", [])
    assert (algorithm.model, algorithm.max_context) == ("Qwen/Qwen3-1.7B", 16384)
