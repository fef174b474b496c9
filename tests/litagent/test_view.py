"""What a sandbox shows and covers, told from paths and folders."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path

import pytest

from agentlightning.litagent import view


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
