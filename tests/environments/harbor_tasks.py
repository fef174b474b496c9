"""Tasks in Harbor's format, written for the tests, and a container image that needs no network."""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.temporary import SHARED, shared_folder

IMAGE = "localhost/agl-harbor-test"
"""Empty folders and links: the system's own programs are mounted into it."""
OPTIONS = [
    *("-v", "/usr:/usr:ro", "-v", "/etc:/etc:ro"),
    *("--ulimit", "nofile=1000:1000", "--ulimit", "nproc=1000:1000", "--ulimit", "sigpending=1000:1000"),
]
ENGINES = [
    "bubblewrap",
    pytest.param("podman", marks=pytest.mark.slow),
    pytest.param("docker", marks=pytest.mark.slow),
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


FIVE = ("plain", "copied", "variables", "apart", "steps")


def five_tasks(folder: Path) -> None:
    """One of each kind: plain; with files and variables of its Dockerfile; with variables and two numbers; with a
    verifier apart; in two steps."""
    write_task(folder / "plain")
    write_task(
        folder / "copied",
        dockerfile="FROM localhost/agl-harbor-test\nWORKDIR /data\nCOPY given.txt data/\nENV GREETING=hello\n",
        files={"environment/given.txt": "given"},
        solution='#!/bin/sh\n[ "$(cat data/given.txt)" = given ] && printf "$GREETING" > out.txt\n',
        test=TEST.format(file="/data/out.txt", right="hello"),
    )
    write_task(
        folder / "variables",
        more='[environment]\nnetwork_mode = "no-network"\nenv = { WORD = "${NOT_SET_ANYWHERE:-hello}" }\n'
        '[verifier]\nenv = { RIGHT = "hello" }\n[solution]\nenv = { MINE = "1" }\n',
        solution='#!/bin/sh\n[ "$MINE" = 1 ] && printf "$WORD" > /app/out.txt\n',
        test='#!/bin/sh\n[ -z "$MINE" ] && [ "$(cat /app/out.txt)" = "$RIGHT" ] && R=1 || R=0\n'
        'echo "{\\"reward\\": $R, \\"style\\": 0.5}" > /logs/verifier/reward.json\nexit 1\n',
    )
    write_task(
        folder / "apart",
        top='artifacts = ["/app/out.txt"]',
        more='[verifier]\nenvironment_mode = "separate"\n',
        solution="#!/bin/sh\nprintf hello | tee out.txt > /logs/artifacts/out.txt; touch /app/mine\n",
        test="#!/bin/sh\n[ ! -e /app/mine ] && [ ! -e /solution/solve.sh ] && cmp out.txt /logs/artifacts/out.txt && "
        '[ "$(cat out.txt)" = hello ] && R=1 || R=0\necho $R > /logs/verifier/reward.txt\n',
    )
    write_task(
        folder / "steps",
        top='multi_step_reward_strategy = "mean"',
        more='[[steps]]\nname = "one"\nmin_reward = 1.0\n[[steps]]\nname = "two"\n',
        files={
            "steps/one/instruction.md": "One.",
            "steps/one/solution/solve.sh": "#!/bin/sh\nprintf 1 > out.txt\n",
            "steps/one/tests/test.sh": TEST.format(file="/app/out.txt", right="1"),
            "steps/two/instruction.md": "Two.",
            "steps/two/workdir/setup.sh": "printf prepared > ready.txt\n",
            "steps/two/solution/solve.sh": '#!/bin/sh\n[ "$(cat ready.txt)" = prepared ] && printf 2 > out.txt\n',
            "steps/two/tests/test.sh": TEST.format(file="/app/out.txt", right="2"),
        },
    )


APART = ("bundled", "images", "inherits")


def tasks_verified_apart(folder: Path) -> None:
    """Verifiers with an image of their own: made for the tests, which it changes; of one step and of the others; the
    agent's, with its variables."""
    right = "echo 1 > /logs/verifier/reward.txt\nelse\necho 0 > /logs/verifier/reward.txt\nfi\n"
    top, apart = 'artifacts = ["/app/out.txt"]', '[verifier]\nenvironment_mode = "separate"\n'
    recipe = f"FROM {IMAGE}\nWORKDIR /app\nCOPY . /tests/\n"
    write_task(
        folder / "bundled",
        top=top,
        more=apart,
        test=f'#!/bin/sh\nif [ -e /tests/made/by.txt ] && [ "$(cat out.txt)" = hello ]; then\n{right}',
        files={"tests/Dockerfile": f"{recipe}COPY note.txt /tests/made/by.txt\n", "tests/note.txt": "x"},
    )
    own = '#!/bin/sh\nif [ "$WHOSE" = {} ] && [ "$(cat out.txt)" = hello ]; then\n' + right
    write_task(
        folder / "images",
        top=top,
        more=f'{apart}[[steps]]\nname = "one"\n[[steps]]\nname = "two"\n',
        test=own.format("tasks"),
        files={
            "tests/Dockerfile": f"{recipe}ENV WHOSE=tasks\n",
            **{f"steps/{name}/instruction.md": "Write hello into out.txt." for name in ("one", "two")},
            **{f"steps/{name}/solution/solve.sh": "#!/bin/sh\nprintf hello > out.txt\n" for name in ("one", "two")},
            "steps/one/tests/test.sh": own.format("steps"),
            "steps/one/tests/Dockerfile": f"{recipe}ENV WHOSE=steps\n",
        },
    )
    write_task(
        folder / "inherits",
        top=top,
        more=f'{apart}[environment]\nenv = {{ WORD = "hello" }}\n',
        test=f'#!/bin/sh\nif [ "$(cat out.txt)" = "$WORD" ]; then\n{right}',
    )


@cache
def serve_docker() -> None:
    """Where docker's client has no server, podman is it until the process has run its tests."""
    if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0 or runs() is not None:
        return
    address = f"unix://{shared_folder('agl-podman-')}/podman.sock"
    serving = subprocess.Popen(["podman", "system", "service", "--time", "0", address])
    SHARED.callback(serving.wait)
    SHARED.callback(serving.terminate)
    os.environ["DOCKER_HOST"] = address
    for _ in range(100):
        if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode == 0:
            return
        time.sleep(0.1)


@cache
def runs(engine: str = "podman") -> str | None:
    """Makes the image. Why there is none, if there is none."""
    if shutil.which(engine) is None:
        return f"{engine} is not installed"
    if engine == "docker":
        serve_docker()
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
    made = subprocess.run([engine, "import", "-", IMAGE], input=packed.getvalue(), capture_output=True, check=False)
    tried = subprocess.run(
        [engine, "run", "--rm", "--network", "none", *OPTIONS, IMAGE, "true"], capture_output=True, check=False
    )
    return None if made.returncode == tried.returncode == 0 else f"{engine} may not run containers here"


def engine_or_skip(engine: str) -> dict[str, Any]:
    """The options of an environment for this engine; skips where this machine has none."""
    if engine == "bubblewrap":
        if shutil.which("bwrap") is None:
            pytest.skip("bubblewrap is not installed")
        return {"engine": engine}
    if (why := runs(engine)) is not None:
        pytest.skip(why)
    return {"engine": engine, "container_options": OPTIONS}


@contextmanager
def run_in_a_pod(task: Path, namespace: str | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A process of its own that has opened a pod for a task, and holds it."""
    code = f"""
        import asyncio
        from agentlightning.environments.harbor.boxes import BoxRequest
        from agentlightning.environments.harbor.format import read_task
        from agentlightning.environments.harbor.pods import open_pod
        from pathlib import Path
        async def main():
            task = read_task(Path({str(task)!r}))
            async with open_pod(BoxRequest(section=task.file.environment, build=task.folder), {namespace!r}):
                print("works", flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"works\n"
        yield process
