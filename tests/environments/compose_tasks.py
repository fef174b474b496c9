"""Tasks of several containers, and an image of this machine's own programs that they run."""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import tarfile
import uuid
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from agentlightning.environments.harbor.project import find_compose
from agentlightning.errors import ConfigError
from tests.environments.harbor_tasks import TEST, runs, write_task

IMAGE = "localhost/agl-compose-test"
_PROGRAMS = [
    *("bash", "cat", "chmod", "cp", "env", "find", "grep", "id", "kill", "ls", "mkdir", "perl", "pwd", "rm", "sh"),
    *("sleep", "tar", "tee", "test", "touch", "tr", "true", "cmp"),
]
LIMITS: dict[str, Any] = {"ulimits": dict.fromkeys(("nofile", "nproc", "sigpending"), 1000)}
SERVER = """\
use IO::Socket::INET;
my $s = IO::Socket::INET->new(LocalPort => 8000, Listen => 5, ReuseAddr => 1) or die;
open(my $f, '<', '/words/word') or die; my $word = <$f>;
while (my $c = $s->accept) { print $c "$word$ENV{MORE}"; close $c }
"""
"""A service that says what stands in a file and a variable."""
CLIENT = "#!/bin/bash\nexec 3<>/dev/tcp/${WHO:-words}/8000 && cat <&3 > /app/out.txt\n"


def services(**more: Any) -> dict[str, Any]:
    """Three services: one that prepares a volume and ends, one that answers, and main, which waits for it."""
    return {
        "services": {
            "prepare": {
                "image": "${MAIN_IMAGE_NAME}",
                "command": ["sh", "-c", "sleep 1; printf hel > /words/word"],
                "volumes": ["words:/words"],
                **LIMITS,
            },
            "words": {
                "image": IMAGE,
                "command": ["perl", "/given/server.pl"],
                "environment": {"MORE": "${REST:-lo}"},
                "volumes": ["words:/words:ro", "./given:/given"],
                "depends_on": {"prepare": {"condition": "service_completed_successfully"}},
                "healthcheck": {
                    "test": ["CMD", "perl", "-e", "use IO::Socket::INET; exit !IO::Socket::INET->new('localhost:8000')"]
                },
                **LIMITS,
                **more,
            },
            "main": {"depends_on": {"words": {"condition": "service_healthy"}}, **LIMITS},
        },
        "volumes": {"words": {}},
    }


def write_composed(folder: Path, document: Any = None, **given: Any) -> Path:
    """A task whose main asks another service."""
    files = {
        "environment/docker-compose.yaml": json.dumps(services() if document is None else document),
        "environment/given/server.pl": SERVER,
        **given.pop("files", {}),
    }
    return write_task(
        folder,
        **{
            "dockerfile": f"FROM {IMAGE}\nWORKDIR /app\n",
            "solution": CLIENT,
            "test": TEST.format(file="/app/out.txt", right="hello"),
            **given,
            "files": files,
        },
    )


def write_two_services(folder: Path) -> Path:
    """A task that waits for no health, which podman does not tell Harbor."""
    words = {"build": "./given", "command": ["perl", "/server.pl"], "environment": ["MORE=lo"], **LIMITS}
    return write_composed(
        folder,
        {"services": {"words": words, "main": {"depends_on": ["words"], **LIMITS}}},
        files={
            "environment/given/Dockerfile": f"FROM {IMAGE}\nCOPY server.pl /\nCOPY word /words/\n",
            "environment/given/word": "hel",
        },
        solution="#!/bin/bash\nfor n in 1 2 3 4 5 6 7 8 9; do exec 3<>/dev/tcp/words/8000 && break; sleep 1; done\n"
        "cat <&3 > /app/out.txt\n",
    )


@cache
def composes() -> str | None:
    """Makes the image. Why there are no tasks of several containers here, if there are none."""
    if (why := runs()) is not None:
        return why
    try:
        find_compose("podman")
    except ConfigError as error:
        return str(error)
    name = f"agl-names-{uuid.uuid4().hex[:8]}"
    try:
        subprocess.run(["podman", "network", "create", name], capture_output=True, check=True)
        shown = ["podman", "network", "inspect", "--format", "{{.DNSEnabled}}", name]
        if subprocess.run(shown, capture_output=True, check=True).stdout.strip() != b"true":
            return "podman's networks give no names here"
    except subprocess.CalledProcessError:
        return "podman makes no networks here"
    finally:
        subprocess.run(["podman", "network", "rm", name], capture_output=True, check=False)
    made = subprocess.run(["podman", "import", "-", IMAGE], input=_packed(), capture_output=True, check=False)
    return None if made.returncode == 0 else "podman imports no image here"


def _packed() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as image:
        for name in ("tmp", "etc", "app", "var", "run", "usr/bin", "usr/lib", "usr/lib64"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            image.addfile(folder)
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            image.addfile(link)
        for name, text in (("etc/passwd", "root:x:0:0::/:/bin/sh\n"), ("etc/group", "root:x:0:\n")):
            file = tarfile.TarInfo(name)
            file.size = len(text)
            image.addfile(file, io.BytesIO(text.encode()))
        for path in sorted(set(_files())):
            at = re.sub(r"^/(bin|lib|lib64)/", r"/usr/\1/", path)
            image.add(Path(path).resolve(), arcname=at.lstrip("/"))
    return packed.getvalue()


def _files() -> Iterator[str]:
    """The programs, their libraries, and what perl reads."""
    for program in _PROGRAMS:
        path = shutil.which(program, path="/usr/bin:/bin")
        assert path is not None, program
        yield path
        found = subprocess.run(["ldd", path], capture_output=True, text=True, check=False).stdout
        yield from re.findall(r"(/\S+) \(0x", found)
    folders = subprocess.run(
        ["/usr/bin/perl", "-e", "print join qq(\\n), @INC"], capture_output=True, text=True, check=True
    )
    for folder in map(Path, folders.stdout.splitlines()):
        for name in (
            "IO",
            "IO.pm",
            "Socket.pm",
            "auto/IO",
            "auto/Socket",
            "auto/Fcntl",
            "Fcntl.pm",
            "strict.pm",
            "warnings.pm",
        ):
            place = folder / name
            yield from (str(file) for file in (place.rglob("*") if place.is_dir() else [place]) if file.is_file())
        for name in (
            "Exporter.pm",
            "Exporter/Heavy.pm",
            "XSLoader.pm",
            "Carp.pm",
            "SelectSaver.pm",
            "Symbol.pm",
            "Errno.pm",
        ):
            if (folder / name).is_file():
                yield str(folder / name)
        for name in (
            "Config.pm",
            "overload.pm",
            "overloading.pm",
            "warnings/register.pm",
            "vars.pm",
            "constant.pm",
            "bytes.pm",
        ):
            if (folder / name).is_file():
                yield str(folder / name)
