"""What a sandbox shows and covers, told from paths and folders."""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from agentlightning.litagent import view
from agentlightning.litagent.bubblewrap import Bubblewrap


@pytest.mark.parametrize("place", ["/", "/opt", "/srv", "/home", "/home/somebody", "/run/user", "/var/lib", "/nix"])
def test_of_a_folder_of_many_things_a_command_sees_its_own_file(place: str) -> None:
    assert view.folder_of(Path(place) / "agent.py") == Path(place) / "agent.py"
    assert view.installation_of(Path(place) / "bin" / "agent") == Path(place) / "bin" / "agent"


@pytest.mark.parametrize("place", ["/app", "/opt/agent", "/srv/agents", "/home/somebody/agent", "/var/lib/agent"])
def test_a_folder_of_its_own_is_seen(place: str) -> None:
    assert view.folder_of(Path(place) / "agent.py") == Path(place)
    assert view.installation_of(Path(place) / "bin" / "agent") == Path(place)


def test_of_nix_only_its_packages_are_seen() -> None:
    assert "/nix/store" in view.SYSTEM
    assert not [place for place in view.SYSTEM if Path("/nix/var/nix/daemon-socket").is_relative_to(place)]


def covered(place: Path) -> set[Path]:
    return {path for path, _ in view.covers(place)}


def test_what_is_no_file_is_covered_however_deep(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    (deep / "link").symlink_to("file")
    (deep / "store.db-wal").touch()
    os.mkfifo(deep / "pipe")
    assert covered(tmp_path) == {deep / "pipe", deep / "store.db-wal"}


def test_a_socket_that_comes_later_is_covered_the_next_time(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b"
    deep.mkdir(parents=True)
    assert covered(tmp_path) == set()
    time.sleep(1.1)  # so long a folder is listed anew
    assert covered(tmp_path) == set()
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(deep / "s"))
        assert covered(tmp_path) == {deep / "s"}
    (deep / "s").unlink()
    assert covered(tmp_path) == set()


def test_what_lies_in_a_covered_run_is_not_looked_for(tmp_path: Path) -> None:
    (tmp_path / "runs" / "first").mkdir(parents=True)
    os.mkfifo(tmp_path / "runs" / "first" / "pipe")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "store.db").touch()
    assert covered(tmp_path) == {tmp_path / "runs", tmp_path / "other"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root lists every folder")
def test_what_cannot_be_listed_is_covered_whole(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o311)
    assert covered(tmp_path) == {tmp_path / "closed"}


LOOKS = """
import fcntl, os, socket, sys
def worked(call, *arguments):
    try:
        call(*arguments)
    except OSError:
        return False
    return True
folder = sys.argv[1]
print("ready", flush=True)
sys.stdin.readline()
print(
    worked(fcntl.flock, os.open(f"{folder}/file", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB),
    worked(socket.socket(socket.AF_UNIX).connect, f"{folder}/socket"),
    worked(os.open, f"{folder}/pipe", os.O_WRONLY | os.O_NONBLOCK),
    open(f"{folder}/mounted/file").read(),
)
"""
layered = pytest.mark.skipif(
    shutil.which("bwrap") is None or "--tmp-overlay" not in view.bubblewrap_help(), reason="bwrap is before 0.11"
)


@layered
def test_locks_and_what_is_made_later_are_not_shared_by_a_folder_that_is_shown() -> None:
    with tempfile.TemporaryDirectory(prefix="agl-") as name, socket.socket(socket.AF_UNIX) as late:
        folder, work = Path(name, "shown"), Path(name, "work")
        (folder / "mounted").mkdir(parents=True)
        work.mkdir()
        (folder / "file").touch()
        (folder / "mounted" / "file").write_text("seen")
        python = [sys.executable, "-I", "-S", "-c", LOOKS, str(folder)]
        command = [*Bubblewrap(read=[folder]).arguments(python, work), *python]
        with (
            (folder / "file").open() as locked,
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run,
        ):
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
            fcntl.flock(locked, fcntl.LOCK_EX)
            late.bind(str(folder / "socket"))
            late.listen()
            os.mkfifo(folder / "pipe")
            reads = os.open(folder / "pipe", os.O_RDONLY | os.O_NONBLOCK)
            assert run.communicate("\n")[0] == "True False False seen\n"
            os.close(reads)


@layered
@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts")
def test_what_is_mounted_in_a_folder_is_shown_with_it(tmp_path: Path) -> None:
    (tmp_path / "shown" / "a b").mkdir(parents=True)
    (tmp_path / "work").mkdir()
    script = f"""
mount -t tmpfs none '{tmp_path}/shown/a b' && echo seen > '{tmp_path}/shown/a b/file'
exec {sys.executable} -c "
import os, pathlib
from agentlightning.litagent.bubblewrap import Bubblewrap
place = pathlib.Path('{tmp_path}')
made = Bubblewrap(read=[place / 'shown']).arguments(['cat'], place / 'work')
os.execvp(made[0], [*made, 'cat', f'{{place}}/shown/a b/file'])
"
"""
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("seen\n", "")
