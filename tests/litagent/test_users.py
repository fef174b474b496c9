"""User ids of their own for attempts: which are given, for how long, and what a program sees of them."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError
from agentlightning.litagent import Program
from agentlightning.litagent.users import IDS, NOBODY, change_owner, is_mapped, leased, own_user, ranges
from tests.litagent.attacks import run
from tests.litagent.test_isolation import needs_bubblewrap

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives user ids")
HOLD = """
import sys
from agentlightning.litagent.users import leased
with leased(range(2147000000, 2147000001), []):
    print("held", flush=True)
    sys.stdin.read()
"""


def some_ids(count: int) -> range:
    """Ids that no other process of the tests takes."""
    first = 2_200_000_000 + os.getpid() * 100
    return range(first, first + count)


def test_no_two_have_the_same_one() -> None:
    ids = some_ids(3)
    with ExitStack() as open_ones:
        held = [open_ones.enter_context(leased(ids, [])) for _ in ids]
        assert sorted(held) == list(ids)
        with pytest.raises(ConfigError, match="subuid"), leased(ids, []):
            pass
    with leased(ids, []) as user:
        assert user in ids


def test_nor_have_two_processes_and_a_killed_one_has_none() -> None:
    of_child = range(2_147_000_000, 2_147_000_001)
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError), leased(of_child, []):
            pass
        child.kill()
        child.wait()
        with leased(of_child, []) as user:
            assert user == of_child[0]


def test_none_is_given_that_somebody_may_give_to_containers() -> None:
    ids = some_ids(4)
    for _ in range(50):
        with leased(ids, [range(0, ids[1]), range(ids[2], ids[2] + 65536)]) as user:
            assert user == ids[1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("alice:100000:65536\nbob:231072:10\n", [range(100000, 165536), range(231072, 231082)]),
        ("# a word\n\nalice:1\nalice:x:5\n:::\nalice:5:1", [range(5, 6)]),
        ("", []),
    ],
)
def test_a_file_of_ranges_is_read_as_far_as_it_can_be(tmp_path: Path, text: str, expected: list[range]) -> None:
    (tmp_path / "subuid").write_text(text)
    assert list(ranges(tmp_path / "subuid")) == expected


@pytest.mark.parametrize(
    ("maps", "whole"),
    [
        ("         0          0 4294967295\n", True),
        ("0 100000 65536\n", False),
        ("0 1000 1\n1 100000 65536\n", False),
        (f"0 0 65536\n{IDS[0]} {IDS[0]} {len(IDS)}\n", True),
        (f"{IDS[0]} {IDS[0]} {len(IDS) - 1}\n", False),
        ("", False),
    ],
)
def test_a_namespace_that_lacks_ids_is_known(tmp_path: Path, maps: str, whole: bool) -> None:
    (tmp_path / "uid_map").write_text(maps)
    assert is_mapped(IDS, tmp_path / "uid_map") is whole
    assert is_mapped(IDS, tmp_path / "none"), "a kernel without user namespaces"


@pytest.mark.quick_with("65536")
@needs_root
@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is not installed")
@pytest.mark.parametrize(
    ("maps", "expected"),
    [
        ("0 0 65536", f"{NOBODY} {NOBODY} 1"),
        ("0 0 1", "ConfigError"),
        ("0 0 4294967295", "own own 0"),
    ],
)
def test_where_ids_are_not_mapped_all_are_nobody_which_is_said_once(maps: str, expected: str) -> None:
    code = """
import logging, sys
from agentlightning.errors import ConfigError
from agentlightning.litagent.users import IDS, own_user
said = []
logging.getLogger("agentlightning").addFilter(lambda record: False)
logging.getLogger("agentlightning.litagent.users").addFilter(lambda record: said.append(record))
sys.stdin.read()
try:
    with own_user() as one, own_user() as two:
        print(*("own" if user in IDS else user for user in (one, two)), len(said))
except ConfigError:
    print("ConfigError")
"""
    command = ["unshare", "--user", sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        ours = os.readlink("/proc/self/ns/user")
        deadline = time.monotonic() + 30
        while os.readlink(f"/proc/{child.pid}/ns/user") == ours and time.monotonic() < deadline:
            time.sleep(0.01)
        for kind in ("gid_map", "uid_map"):
            Path(f"/proc/{child.pid}/{kind}").write_text(maps)
        assert child.communicate("")[0].strip() == expected


@needs_root
def test_what_links_lead_to_is_given_to_nobody(tmp_path: Path) -> None:
    (tmp_path / "victim").mkdir()
    (tmp_path / "victim" / "file").touch()
    deep = tmp_path / "folder"
    deep.mkdir()
    (deep / "link").symlink_to(tmp_path / "victim")
    (deep / "-file").symlink_to(tmp_path / "victim" / "file")
    with own_user() as user:
        change_owner(user, deep)
    assert {p.lstat().st_uid for p in (deep, deep / "link", deep / "-file")} == {user}
    assert {p.lstat().st_uid for p in (tmp_path / "victim", tmp_path / "victim" / "file")} == {0}


def test_what_cannot_be_given_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none"):
        change_owner(NOBODY, tmp_path / "none")


WHO = """
import grp, json, os, pwd, time
open("mine", "w").close()
deadline = time.monotonic() + 30
while not os.path.exists("go") and time.monotonic() < deadline:
    time.sleep(0.01)
user = pwd.getpwuid(os.getuid())
assert grp.getgrgid(os.getgid()).gr_name == user.pw_name, "it has a name"
assert os.getuid() == os.getgid() and os.getgroups() in ([], [os.getgid()])
assert pwd.getpwnam("root").pw_uid == 0, "and so have others"
print(1)
"""


@needs_root
@needs_bubblewrap
async def test_attempts_that_are_open_together_are_different_users(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    os.chmod(tmp_path, 0o755)  # the program is read by whoever it runs as
    (tmp_path / "agent.py").write_text(WHO)
    agent = Program([sys.executable, "-S", str(tmp_path / "agent.py")], isolation="bubblewrap", workspaces=kept)

    async def until_all_are_open() -> set[int]:
        while len(mine := list(kept.glob("*/mine"))) < 3:  # noqa: ASYNC110 – other processes make them
            await asyncio.sleep(0.02)
        for file in mine:
            (file.parent / "go").touch()
        return {file.stat().st_uid for file in mine}

    async with asyncio.timeout(60):
        users, ended = await asyncio.gather(until_all_are_open(), asyncio.gather(*(run(agent) for _ in range(3))))
    assert [reward for _, reward in ended] == [1.0] * 3, ended
    assert len(users) == 3
    assert all(user in IDS for user in users)
    with pytest.raises(KeyError):
        pwd.getpwuid(users.pop())


@needs_bubblewrap
@pytest.mark.parametrize("isolation", [None, "bubblewrap"])
async def test_a_grader_reads_what_the_program_left(tmp_path: Path, isolation: Any) -> None:
    code = (
        "import os\nos.mkdir('in', 0o700)\nopen(os.open('in/answer', os.O_CREAT | os.O_WRONLY, 0o600), 'w').write('7')"
    )
    grader = "import json, sys\nprint(open(json.load(sys.stdin)['workspace'] + '/in/answer').read())"
    python = [sys.executable, "-S", "-c"]
    rollout, reward = await run(Program([*python, code], grader=[*python, grader], isolation=isolation))
    assert reward == 7.0, rollout.attempt.error


async def test_without_isolation_a_program_runs_as_you() -> None:
    rollout, reward = await run(Program([sys.executable, "-S", "-c", "import os; print(os.getuid())"]))
    assert reward == os.geteuid(), rollout.attempt.error
