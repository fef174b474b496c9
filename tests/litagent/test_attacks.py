"""The table of docs/security.md: what each isolation keeps a program from, each cell tried out by a hostile program.

As the user of the tests and, where that is root, as nobody too. The container is one of podman's, with nothing but the
system's own folders as its image.
"""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.litagent.bubblewrap import INSIDE, check_bubblewrap
from agentlightning.litagent.users import NOBODY
from tests.litagent.attacks import ATTACKS, GRADED
from tests.litagent.sharing import EACH, SHARED
from tests.temporary import shared_folder

ROOT = Path(__file__).parents[2]
COLUMNS = ("none", "bubblewrap", "container")
USERS = ("root", "not root")
PODMAN = [
    *("run", "--rm", "-i", "--name", "{name}", "--network", "host", "--cap-drop", "ALL"),
    *("--security-opt", "no-new-privileges", "-v", "{workspace}:{workspace}", "-w", "{workspace}", "{env}", "{user}"),
    *("--ulimit", "nofile=1000:1000", "--ulimit", f"nproc={EACH}:{EACH}", "--ulimit", f"sigpending={EACH}:{EACH}"),
]


def promised() -> dict[str, dict[str, str]]:
    """The rows of the table: an attack, and whether it works in each isolation."""
    lines = (ROOT / "docs" / "security.md").read_text().splitlines()
    start = lines.index(next(line for line in lines if line.startswith("| a program can")))
    rows: dict[str, dict[str, str]] = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        attack, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[attack] = dict(zip(COLUMNS, cells, strict=True))
    return rows


@cache
def home_of(user: str) -> str:
    """A home for podman's own files."""
    home = shared_folder("agl-home-")
    if user != "root" and os.geteuid() == 0:
        os.chown(home, NOBODY, NOBODY)
    return home


@cache
def container(runtime: str, user: str) -> str | None:
    """A container command as JSON, if this machine lets podman run one."""
    image = Path(home_of(user)) / f"image-{runtime}"
    for name in ("usr", "etc", "tmp", "proc", "dev", "sys", "run"):
        (image / name).mkdir(parents=True)
    for alias in ("bin", "lib", "lib64"):
        (image / alias).symlink_to(f"usr/{alias}")
    if user != "root" and os.geteuid() == 0:
        for path in (image, *image.iterdir()):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    base = ["podman", *(("--runtime", runtime) if runtime else ()), *PODMAN, "-v", "/usr:/usr:ro", "-v", "/etc:/etc:ro"]
    command = [*base, "--rootfs", str(image)]
    tried = [
        a.replace("{workspace}", "/tmp").replace("{name}", "agl-try") for a in command if a not in ("{env}", "{user}")
    ]
    given = {"PATH": os.environ["PATH"], "HOME": home_of(user)}
    run = [*as_user(user), *tried, "/usr/bin/python3", "-c", ""]
    done = subprocess.run(run, capture_output=True, check=False, timeout=60, env=given)
    return json.dumps(command) if done.returncode == 0 else None


def isolation(kind: str, user: str) -> str:
    """The argument for the attacks; skips where this machine has no such thing."""
    if kind == "none":
        return "none"
    if kind == "bubblewrap":
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        return kind
    if shutil.which("podman") is None or not os.path.exists("/usr/bin/python3"):
        pytest.skip("podman, or a Python of the system to run in its container, is not installed")
    found = container("", user) or container("runc", user)
    if found is None:
        pytest.skip(f"podman may not run containers here, {user}")
    return found


def as_user(user: str) -> list[str]:
    """What to put before a command. An interpreter in root's home is made visible to the other user."""
    if (os.geteuid() == 0) == (user == "root"):
        return []
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    # A shell in between: setpriv itself still has root's capabilities when it looks for the program.
    run = ["/bin/sh", "-c", 'exec "$@"', "sh"]
    prefix = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *run]
    if subprocess.run([*prefix, sys.executable, "-c", ""], capture_output=True, check=False).returncode == 0:
        return prefix
    if shutil.which("bwrap") is None:
        pytest.skip("the interpreter is not readable for others")
    home, base = Path.home(), Path(sys.base_prefix)
    above = [p for p in reversed(base.parents) if p.is_relative_to(home)]
    open_home = [a for place in above for a in ("--perms", "0755", "--dir", str(place))]
    view = ["--dev-bind", "/", "/", "--perms", "0755", "--tmpfs", str(home), *open_home]
    return ["bwrap", *view, "--ro-bind", str(base), str(base), "--", *prefix]


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, str], dict[str, bool]]:
    """Of every attack, by isolation and user, as they are asked for."""
    return {}


def attack(kind: str, user: str) -> dict[str, bool]:
    chosen = isolation(kind, user)
    prefix = as_user(user)
    folder = tempfile.mkdtemp(prefix="agl-attacks-")  # not below pytest's own, which others may not enter
    try:
        if user != "root" and os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        command = [*prefix, sys.executable, "-m", "tests.litagent.attacks", chosen, folder]
        home = home_of(user) if kind == "container" else "/nowhere"
        environment = {**os.environ, "AGL_STORE_KEY": "the-store's-admin-key", "HOME": home}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=110
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_the_table_has_every_attack() -> None:
    assert list(promised()) == [*ATTACKS, *GRADED, *SHARED]


@pytest.mark.quick_with("none-", "bubblewrap-")  # an image is made for the containers
@pytest.mark.parametrize("name", [*ATTACKS, *GRADED, *SHARED])
@pytest.mark.parametrize("user", [pytest.param("root", marks=pytest.mark.slow), "not root"])
@pytest.mark.parametrize("kind", COLUMNS)
def test_each_isolation_keeps_what_the_table_promises(
    outcomes: dict[tuple[str, str], dict[str, bool]], kind: str, user: str, name: str
) -> None:
    if (kind, user) not in outcomes:
        outcomes[kind, user] = attack(kind, user)
    cell = promised()[name][kind]
    expected = {"yes": True, "no": False, "as root": user == "root", "not as root": user != "root"}[cell]
    assert outcomes[kind, user][name] is expected


LEAKS = {
    "network interface": "given.remove('--unshare-net')",
    "a socket deep in a folder": "given = [a if a != '/dev/null' else given[i + 1] for i, a in enumerate(given)]",
    "user namespaces": f"""
given = [a for a in given if a != '--disable-userns']
at = given.index('--remount-ro')
given[at:at] = ['--ro-bind', '{{lenient}}', {str(INSIDE)!r}]
""",
}
"""A bwrap that keeps the network, one that covers nothing, and one that runs a relay without its filter."""


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")
@pytest.mark.parametrize("found", LEAKS)
def test_a_sandbox_that_does_not_hold_is_refused(found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lenient = tmp_path / "relay.py"
    lenient.write_text(INSIDE.read_text().replace("    refuse_other_calls()\n", ""))
    leaky = tmp_path / "bwrap"
    real = shutil.which("bwrap")
    leaky.write_text(f"""#!{sys.executable}
import os, sys
given = sys.argv
{LEAKS[found].replace("{lenient}", str(lenient))}
os.execv({real!r}, given)
""")
    leaky.chmod(leaky.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    check_bubblewrap.cache_clear()
    try:
        with pytest.raises(ConfigError, match=found):
            check_bubblewrap()
    finally:
        check_bubblewrap.cache_clear()
