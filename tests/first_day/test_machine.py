"""What the machine lacks: a port that is taken, a full disk, too few open files, closed streams, a hidden package."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.errors import of_the_machine
from agentlightning.metrics import SilentConsole
from tests.first_day.day import answers, script


def test_a_port_that_is_taken_is_known_before_the_model_is_loaded(tmp_path: Path) -> None:
    loaded: list[Any] = []

    def load(spec: Any) -> Any:
        loaded.append(spec)
        raise AssertionError("it is loaded in vain")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        trainer = agl.Trainer(
            algorithm=agl.GRPO(model="calc", backend=load, steps=1),
            port=port,
            run_dir=tmp_path / "run",
            console=SilentConsole(),
        )
        with pytest.raises(agl.GatewayError, match=f"cannot listen on 127.0.0.1:{port}: .*Give another port"):
            trainer.fit(lambda task, llm: 1.0, [1])
    assert not loaded


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "could not be written: No space left on device. Make room on the disk"),
        (errno.EDQUOT, "Make room on the disk"),
        (errno.EMFILE, "Allow more (ulimit -n 4096)"),
        (errno.EROFS, "Give a folder that can be written"),
        (errno.EACCES, "'runs/a/tasks.jsonl' cannot be used: Permission denied"),
    ],
)
def test_what_a_disk_refuses_has_a_next_step(number: int, words: str) -> None:
    assert words in (of_the_machine(OSError(number, os.strerror(number), "runs/a/tasks.jsonl")) or "")


def test_a_script_says_in_words_what_the_disk_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    text = (
        "from pathlib import Path\nfrom agentlightning.files import atomic_write\natomic_write(Path('taken/x'), '')\n"
    )
    answers(script(tmp_path, text), "'taken/x' cannot be used: Not a directory")


def test_the_scripts_own_files_are_pythons_matter(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = script(tmp_path, "open('taken/x')\n")
    assert "Traceback" in done.stderr
    assert "NotADirectoryError" in done.stderr


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_stream_that_is_closed_leaves_its_number_to_no_file(tmp_path: Path, closed: str) -> None:
    (tmp_path / "train.py").write_text(
        "import agentlightning as agl\nwith open('number', 'w') as file:\n    file.write(str(file.fileno()))\n"
    )
    subprocess.run(["sh", "-c", f'exec "{sys.executable}" train.py {closed}'], cwd=tmp_path, check=True)
    assert int((tmp_path / "number").read_text()) > 2


@pytest.mark.parametrize(("closed", "name"), [("<&-", "stdin"), (">&-", "stdout"), ("2>&-", "stderr")])
def test_a_stream_that_is_closed_can_be_used(tmp_path: Path, closed: str, name: str) -> None:
    use = "sys.stdin.read()" if name == "stdin" else f"sys.{name}.write('x')"
    (tmp_path / "train.py").write_text(f"import sys\nimport agentlightning as agl\n{use}\nopen('ended', 'w').close()\n")
    subprocess.run(["sh", "-c", f'exec "{sys.executable}" train.py {closed}'], cwd=tmp_path, check=True)
    assert (tmp_path / "ended").exists()


def test_a_tree_that_does_not_fit_on_the_disk_is_a_full_disk() -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "a", None, "b")
    words = of_the_machine(shutil.Error([("model/a", "copy/a", str(full)), ("model/b", "copy/b", str(full))]))
    assert words is not None
    assert words.startswith("'copy/a' could not be written: No space left on device. Make room on the disk")


@pytest.mark.parametrize("name", ["rich", "pydantic"])
@pytest.mark.quick_with("rich")
def test_a_file_that_hides_a_package_of_several_files(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    (tmp_path / "train.py").write_text("import agentlightning as agl\nagl.GRPO(model='calc')\nagl.Trainer()\n")
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert f"{name}.py is a file of yours, and hides the package '{name}': give the file another name" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit is Linux's")
def test_a_model_for_which_there_is_no_memory(tmp_path: Path) -> None:
    """How much a process needs before it loads the model depends on the build of torch, so several limits are tried."""
    trains = "agl.Trainer(algorithm=agl.Baseline(model='calc')).fit(lambda task: 1.0, [1])"
    (tmp_path / "train.py").write_text(f"import agentlightning as agl\nif __name__ == '__main__':\n    {trains}\n")
    said = ""
    for limit in range(700_000, 1_500_000, 100_000):
        command = f"ulimit -v {limit}; exec {sys.executable} train.py"
        said += subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False).stderr
        if "There is not enough memory for" in said:
            break
    assert "agl plan --model" in said
    assert "raise the limit (ulimit -v" in said
