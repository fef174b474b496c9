"""What a run writes is its owner's alone, whatever the umask; `AGL_UMASK` lets a group in, and nothing else does."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.files import atomic_directory, atomic_write, make_folder, open_private
from tests.typed import typed

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has other permissions")

RUN = """
import os, sys
os.umask(int(sys.argv[1], 8))
import agentlightning as agl

@agl.rollout
def agent(task, llm):
    import openai
    client = openai.OpenAI(base_url=llm.endpoint, api_key=llm.api_key)
    asked = [{"role": "user", "content": task["question"]}]
    client.chat.completions.create(model=llm.model, messages=asked, max_tokens=8)
    return 1.0 if task["question"] == "1" else 0.0

algorithm = agl.GRPO(model="calc", steps=1, group_size=2, tasks_per_step=2, save_every=1)
trainer = agl.Trainer(algorithm=algorithm, n_runners=2, run_dir="deep/run")
trainer.fit(agent, [{"question": "1"}, {"question": "2"}])
"""


def modes(folder: Path) -> dict[str, str]:
    """The permissions of what is below the folder, and its own."""
    return {str(p.relative_to(folder)): oct(stat.S_IMODE(p.stat().st_mode)) for p in (folder, *folder.rglob("*"))}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("umask", "allowed", "file", "directory"), [("0", None, "0o600", "0o700"), ("077", "007", "0o660", "0o770")]
)
def test_all_that_a_run_leaves(tmp_path: Path, umask: str, allowed: str | None, file: str, directory: str) -> None:
    (tmp_path / "run.py").write_text(RUN)
    done = typed(tmp_path, "run.py", umask, environment={} if allowed is None else {"AGL_UMASK": allowed})
    assert done.returncode == 0, done.stderr
    found = modes(tmp_path / "deep" / "run")
    assert {"store.db", "metrics.jsonl", "run.json"} <= set(found)
    assert any(name.endswith(".safetensors") for name in found)
    assert any(name.endswith("optimizer.pt") for name in found)
    whole = {name: directory if (tmp_path / "deep" / "run" / name).is_dir() else file for name in found}
    assert found == whole


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> object:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def written(folder: Path) -> set[tuple[bool, str]]:
    """Everything that writes files for runs, once; the permissions of folders (True) and files."""
    atomic_write(folder / "a" / "text.json", json.dumps(1))
    with atomic_directory(folder / "b" / "model") as work:
        (work / "inner").mkdir()
        (work / "inner" / "weights").write_text("w")
    make_folder(folder / "c" / "d")
    with open_private(folder / "log", "a", encoding="utf-8") as file:
        file.write("x")
    return {(path.is_dir(), oct(stat.S_IMODE(path.stat().st_mode))) for path in folder.rglob("*")}


@pytest.mark.usefixtures("umask")
def test_nobody_else_reads_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AGL_UMASK", raising=False)
    assert written(tmp_path) == {(True, "0o700"), (False, "0o600")}


@pytest.mark.usefixtures("umask")
def test_a_group_reads_and_writes_where_it_is_let_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGL_UMASK", "007")
    assert written(tmp_path) == {(True, "0o770"), (False, "0o660")}


def test_a_file_that_is_there_keeps_its_permissions(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    (tmp_path / "log").chmod(0o644)
    with open_private(tmp_path / "log", "a") as file:
        file.write("after\n")
    assert modes(tmp_path)["log"] == "0o644"


@pytest.mark.parametrize("value", ["group", "7", "999", "-77", "0o077"])
def test_a_umask_that_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("AGL_UMASK", value)
    with pytest.raises(ConfigError, match="AGL_UMASK"):
        atomic_write(tmp_path / "x", "")
