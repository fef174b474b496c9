"""The rewards of tasks equal those that Harbor's own runner gives, on the same tasks and the same container engine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentlightning.environments.harbor import HarborEnvironment
from tests.environments.compose_tasks import composes, write_two_services
from tests.environments.harbor_tasks import (
    APART,
    FIVE,
    OPTIONS,
    engine_or_skip,
    five_tasks,
    tasks_verified_apart,
    write_task,
)
from tests.environments.interpreters import interpreter
from tests.environments.test_registry import committed, entry, git, registry

VERSION = "0.26.0"
RUNNER = Path(__file__).with_name("harbor_runner.py")
WRONG = {
    "nothing": "#!/bin/sh\ntrue\n",
    "words": "#!/bin/sh\necho good > /logs/verifier/reward.txt\n",
    "nan": "#!/bin/sh\necho nan > /logs/verifier/reward.txt\n",
    "both": "#!/bin/sh\necho 0 > /logs/verifier/reward.txt; echo '{\"reward\": 1}' > /logs/verifier/reward.json\n",
    "failing": "#!/bin/sh\necho 0.25 > /logs/verifier/reward.txt\nexit 7\n",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def newer_pythons() -> Iterator[str]:
    """Interpreters that Harbor takes: 3.12 and newer."""
    if sys.version_info >= (3, 12):
        yield sys.executable
    yield from filter(None, (shutil.which(f"python3.{minor}") for minor in (14, 13, 12)))
    yield from map(str, Path("~/.pyenv/versions").expanduser().glob("3.1[2-9]*/bin/python"))


@pytest.fixture(scope="module")
def harbor() -> str:
    """An interpreter with Harbor: HARBOR_PYTHON, or one that is made."""
    engine_or_skip("podman")
    return interpreter("HARBOR_PYTHON", (f"harbor=={VERSION}",), tuple(newer_pythons()))


def theirs(harbor: str, task: Path, agent: str, folder: Path, *options: str) -> dict[str, float] | None:
    """The rewards that Harbor gives; None where its trial has none."""
    command = [harbor, str(RUNNER), str(task), agent, str(folder), *(options or OPTIONS)]
    environment = {**os.environ, "HARBOR_TELEMETRY": "off"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])["rewards"]


def ours(task: Path, agent: str, **options: Any) -> float | None:
    """The reward that trains here; None where there is none."""
    env = HarborEnvironment(str(task), **(options or engine_or_skip("podman")))

    async def probes() -> dict[str, Any]:
        return {probe.by: probe.reward async for probe in env.probes(env.tasks())}

    return asyncio.run(probes())["solution" if agent == "oracle" else "nothing"]


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("name", FIVE)
def test_five_tasks(harbor: str, name: str, agent: str, tmp_path: Path) -> None:
    five_tasks(tmp_path / "tasks")
    task = tmp_path / "tasks" / name
    found = theirs(harbor, task, agent, tmp_path / "trials")
    assert found is not None
    assert ours(task, agent) == found["reward"]


@pytest.mark.parametrize("agent", ["oracle", "nop"])
@pytest.mark.parametrize("name", APART)
def test_verifiers_with_an_image_of_their_own(harbor: str, name: str, agent: str, tmp_path: Path) -> None:
    tasks_verified_apart(tmp_path / "tasks")
    task = tmp_path / "tasks" / name
    found = theirs(harbor, task, agent, tmp_path / "trials")
    assert found is not None
    assert ours(task, agent) == found["reward"] == float(agent == "oracle")


FETCH = """\
import asyncio, json, sys
from pathlib import Path
from harbor.registry.client.json import JsonRegistryClient
from harbor.tasks.client import TaskClient
async def main(file, name, folder):
    found = await JsonRegistryClient(path=Path(file)).get_dataset_metadata(name)
    fetched = await TaskClient().download_tasks(found.task_ids, output_dir=Path(folder))
    print(json.dumps([str(path) for path in fetched.paths]))
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.parametrize("name", ["mine@1.0", "mine"])
def test_names_of_a_registry_mean_the_same_tasks(
    harbor: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = tmp_path / "source"
    for one in ("one", "two"):
        write_task(source / "sets" / one)
    git(source, "init", "--quiet")
    older = committed(source)
    (source / "sets" / "two" / "instruction.md").write_text("Another one.")
    listed = [
        entry(source.as_uri(), older, "two", "one"),
        entry(source.as_uri(), committed(source), "two", version="2"),
    ]
    file = registry(tmp_path, *listed)
    command = [harbor, "-c", FETCH, file, name, str(tmp_path / "theirs")]
    environment = {**os.environ, "HARBOR_TELEMETRY": "off"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    env = HarborEnvironment(name, registry_path=file, **engine_or_skip("podman"))
    found = [contents(Path(task["path"])) for task in env.tasks()]
    assert found == [contents(Path(path)) for path in json.loads(done.stdout.splitlines()[-1])]
    assert len(found) == (2 if name == "mine@1.0" else 1)


def contents(folder: Path) -> dict[str, tuple[bytes, bool]]:
    """The files below a folder, and whether they are programs."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.read_bytes(), os.access(file, os.X_OK)) for file in files}


@pytest.mark.parametrize("kind", WRONG)
def test_what_verifiers_write(harbor: str, kind: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", test=WRONG[kind])
    found = theirs(harbor, task, "oracle", tmp_path / "trials")
    assert ours(task, "oracle") == (None if found is None else found["reward"])


@pytest.mark.parametrize("agent", ["oracle", "nop"])
def test_several_containers(harbor: str, agent: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With Harbor's own environment of podman, which needs a newer podman-compose than Debian 12 has."""
    if (why := composes()) is not None:
        pytest.skip(why)
    python = interpreter("PODMAN_COMPOSE_PYTHON", ("podman-compose==1.6.0",), (sys.executable,))
    monkeypatch.setenv("PATH", f"{Path(python).parent}:{os.environ['PATH']}")
    task = write_two_services(tmp_path / "task")
    found = theirs(harbor, task, agent, tmp_path / "trials", "--its-own-podman")
    assert found is not None
    assert ours(task, agent, engine="podman") == found["reward"] == float(agent == "oracle")
