"""A task's folder that was copied from a stranger: its links, its sizes, its odd files."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

import pytest

from agentlightning.environments.harbor import archives, boxes
from agentlightning.environments.harbor.boxes import BoxRequest
from agentlightning.environments.harbor.containers import content_digest
from agentlightning.environments.harbor.dataset import check_dataset, digest_of
from agentlightning.environments.harbor.format import EnvironmentSection, read_task
from agentlightning.environments.harbor.registry import newest
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.files import remove_tree
from tests.environments.harbor_tasks import write_task

STEPS = '[[steps]]\nname = "one"\n'
FILES = {"steps/one/instruction.md": "One.", "steps/one/tests/test.sh": "true\n", "steps/one/workdir/a": "a"}


@pytest.mark.parametrize(
    "place",
    [
        "task.toml",
        "environment",
        "environment/Dockerfile",
        "tests",
        "tests/test.sh",
        "solution",
        "solution/solve.sh",
        "steps",
        "steps/one",
        "steps/one/tests",
        "steps/one/tests/test.sh",
        "steps/one/workdir",
    ],
)
def test_what_is_copied_into_the_box_is_the_tasks_own(place: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=STEPS if "steps" in place else "", files=FILES)
    read_task(task)
    secret = tmp_path / "secret"
    (task / place).rename(secret)
    (task / place).symlink_to(secret)
    with pytest.raises(ConfigError, match="is a link to another place"):
        read_task(task)


def test_links_within_a_task_are_its_own(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    shutil.move(task / "tests", task / "checks")
    (task / "tests").symlink_to("checks")
    (tmp_path / "other").symlink_to(task)
    assert read_task(tmp_path / "other").stages[0].tests


ODD = {
    "nested lists": "a = " + "[" * 50_000,
    "nested tables": "a = " + "{a=" * 5_000 + "1" + "}" * 5_000,
    "a key of many parts": ".".join("a" * 20_000) + " = 1",
    "a number of many digits": "a = " + "9" * 5_000,
    "a size beyond all numbers": "\n[environment]\nmemory = '" + "9" * 400 + "G'",
    "an image of this machine": "\n[environment]\ndocker_image = 'oci-archive:/srv/image.tar'",
    "a folder as an image": "\n[environment]\ndocker_image = 'dir:/etc'",
}


@pytest.mark.parametrize("kind", ODD)
def test_an_odd_file_is_named(kind: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more="[metadata]\n" + ODD[kind])
    with pytest.raises(ConfigError, match=r"task\.toml"):
        read_task(task)


def test_a_data_sets_list_is_read_as_carefully(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    (tmp_path / "dataset.toml").write_text("[dataset]\na = " + "[" * 50_000)
    with pytest.raises(ConfigError, match=r"dataset\.toml"):
        check_dataset(tmp_path, [task])


@pytest.mark.parametrize("name", ["task.toml", "instruction.md"])
@pytest.mark.parametrize("kind", ["pipe", "a terabyte"])
def test_neither_a_pipe_nor_a_terabyte_is_read(kind: str, name: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    (task / name).unlink()
    if kind == "pipe":
        os.mkfifo(task / name)
    else:
        with (task / name).open("wb") as file:
            file.truncate(2**40)
    with pytest.raises(ConfigError, match=name):
        read_task(task)


def test_digests_read_nothing_through_links(tmp_path: Path) -> None:
    task = write_task(tmp_path / "task")
    assert digest_of(task) is not None
    (tmp_path / "secret").write_bytes((task / "tests" / "test.sh").read_bytes())
    (task / "tests" / "link").symlink_to(tmp_path / "secret")
    assert digest_of(task) is None
    assert content_digest(task / "tests" / "link") != content_digest(task / "tests" / "test.sh")


async def test_what_packs_in_a_box_may_say_much_and_never_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loud = ["sh", "-c", "head -c 30000000 /dev/zero | tr '\\0' e >&2; echo end >&2; printf archive"]
    code, said = await archives.streamed(loud, dict(os.environ), tmp_path / "archive")
    assert (code, len(said), said[-4:]) == (0, 10_000, "end\n")
    assert (tmp_path / "archive").read_bytes() == b"archive"
    monkeypatch.setattr(archives, "_SECONDS", 0.2)
    with pytest.raises(ExecutorError, match="to pack files"):
        await asyncio.wait_for(archives.streamed(["sleep", "60"], dict(os.environ), tmp_path / "archive"), 30)


def _archive(place: Path, *members: tarfile.TarInfo, mode: Literal["w", "w:gz", "w:xz"] = "w") -> Path:
    with tarfile.open(place, mode, format=tarfile.PAX_FORMAT) as archive:
        for member in members:
            archive.addfile(member, io.BytesIO(bytes(member.size)))
    return place


def _member(name: str, size: int = 1, headers: dict[str, str] | None = None) -> tarfile.TarInfo:
    found = tarfile.TarInfo(name)
    found.size, found.pax_headers = size, headers or {}
    return found


def test_an_archive_of_a_box_is_as_large_as_it_says(tmp_path: Path) -> None:
    hole = _member(
        "it/hole", headers={"GNU.sparse.size": str(2**40), "GNU.sparse.numblocks": "0", "GNU.sparse.map": "0,1"}
    )
    plain = _archive(tmp_path / "plain", _member("it/a"), hole)
    assert archives.unpacked(plain, tmp_path / "out", "it", tmp_path / "it")
    assert sorted(file.name for file in (tmp_path / "it").iterdir()) == ["a"]
    for mode in ("w:gz", "w:xz"):
        bomb = _archive(tmp_path / "bomb", _member("it/b", 2**20), mode=mode)
        with pytest.raises(ExecutorError, match="is no archive"):
            archives.unpacked(bomb, tmp_path / f"out-{mode[2:]}", "it", tmp_path / "taken")


def test_forged_headers_of_an_archive_are_no_traceback(tmp_path: Path) -> None:
    for name, value in (
        ("mtime", "1e300"),
        ("mtime", "nan"),
        ("size", "-5"),
        ("uid", "9" * 5000),
        ("path", "a" * 5000),
    ):
        forged = _archive(tmp_path / "forged", _member("it/a", headers={name: value}))
        with suppress(ExecutorError):
            archives.unpacked(forged, tmp_path / "out", "it", tmp_path / "it")


@pytest.mark.slow
def test_what_an_agent_leaves_is_not_packed_into_memory_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files with holes, many empty ones, and folders nested without end."""
    sparse, many, deep = (tmp_path / name for name in ("sparse", "many", "deep"))
    for folder in (sparse, many, deep):
        folder.mkdir()
    for number in range(3):
        with (sparse / str(number)).open("wb") as file:
            file.truncate(1 << 40)
        (many / str(number)).touch()
    with pytest.raises(ExecutorError, match="more than 1,024 MiB are not copied"):
        boxes.packed(sparse)
    assert boxes.packed(many)
    monkeypatch.setattr(boxes, "MOST_PACKED", 2000)
    with pytest.raises(ExecutorError, match="are not copied"):
        boxes.packed(many)
    monkeypatch.undo()
    at = os.open(deep, os.O_RDONLY)
    for _ in range(1200):
        os.mkdir("d", dir_fd=at)
        below = os.open("d", os.O_RDONLY, dir_fd=at)
        os.close(at)
        at = below
    os.close(at)
    with pytest.raises(ExecutorError, match="nested as deep"):
        boxes.packed(deep)
    remove_tree(deep)


@pytest.mark.parametrize("text", ['COPY "a b', "ENV a='", b"\xff\xfe"])
async def test_a_recipe_that_cannot_be_read_names_its_file(text: str | bytes, tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match="Dockerfile cannot be read"):
        async with boxes.open_sandbox(BoxRequest(section=EnvironmentSection(), build=tmp_path, environment={})):
            pass


@pytest.mark.parametrize("setting", ["retries = 1000000", "interval_sec = inf", "start_period_sec = 1e9"])
def test_nobody_waits_without_end_for_a_healthcheck(setting: str, tmp_path: Path) -> None:
    more = f'[environment.healthcheck]\ncommand = "true"\n{setting}\n'
    with pytest.raises(ConfigError, match=setting.partition(" ")[0]):
        read_task(write_task(tmp_path / "task", more=more))


def test_a_version_of_very_many_digits_is_ordered_by_its_letters() -> None:
    assert newest(["9" * 5_000, "1.0", "2.0"]) == "2.0"
