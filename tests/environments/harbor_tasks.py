"""Tasks in Harbor's format, written for the tests, and a container image that needs no network."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import tarfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

IMAGE = "localhost/agl-harbor-test"
"""Empty folders and links: the system's own programs are mounted into it."""
OPTIONS = [
    *("-v", "/usr:/usr:ro", "-v", "/etc:/etc:ro"),
    *("--ulimit", "nofile=1000:1000", "--ulimit", "nproc=1000:1000", "--ulimit", "sigpending=1000:1000"),
]
TOML = """\
schema_version = "1.4"
{top}
[task]
name = "tests/{name}"
{more}
"""
TEST = """\
#!/bin/sh
if [ "$(cat {file} 2>/dev/null)" = "{right}" ]; then echo 1; else echo 0; fi > /logs/verifier/reward.txt
"""


def write_task(
    folder: Path,
    *,
    top: str = "",
    more: str = "",
    instruction: str = "Write hello into the file out.txt.",
    dockerfile: str = f"FROM {IMAGE}\nWORKDIR /app\n",
    test: str | None = None,
    solution: str | None = "#!/bin/sh\nprintf hello > out.txt\n",
    files: dict[str, str] | None = None,
) -> Path:
    """A task; files below `files` are written too, scripts among them."""
    written = {
        "task.toml": TOML.format(name=folder.name, top=top, more=more),
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "tests/test.sh": TEST.format(file="/app/out.txt", right="hello") if test is None else test,
        **({"solution/solve.sh": solution} if solution is not None else {}),
        **(files or {}),
    }
    for name, text in written.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        if name.endswith(".sh"):
            path.chmod(0o755)
    return folder


@cache
def podman_runs() -> str | None:
    """Makes the image. Why there is none, if there is none."""
    if shutil.which("podman") is None:
        return "podman is not installed"
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as image:
        for name in ("usr", "etc", "tmp", "proc", "dev", "sys", "run"):
            folder = tarfile.TarInfo(name)
            folder.type, folder.mode = tarfile.DIRTYPE, 0o1777 if name == "tmp" else 0o755
            image.addfile(folder)
        for name in ("bin", "lib", "lib64"):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, f"usr/{name}"
            image.addfile(link)
    made = subprocess.run(["podman", "import", "-", IMAGE], input=packed.getvalue(), capture_output=True, check=False)
    tried = subprocess.run(
        ["podman", "run", "--rm", "--network", "none", *OPTIONS, IMAGE, "true"], capture_output=True, check=False
    )
    return None if made.returncode == tried.returncode == 0 else "podman may not run containers here"


def engine_or_skip(engine: str) -> dict[str, Any]:
    """The options of an environment for this engine; skips where this machine has none."""
    if engine == "bubblewrap":
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        return {"engine": engine}
    if (why := podman_runs()) is not None:
        pytest.skip(why)
    return {"engine": engine, "container_options": OPTIONS}


AS_ROOT = os.geteuid() == 0
