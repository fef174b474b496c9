"""`engine=kubernetes`: attempts in pods, with a stand-in for kubectl and the cluster behind it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.harbor import HarborEnvironment
from agentlightning.environments.harbor.format import EnvironmentSection, read_task
from agentlightning.environments.harbor.pods import manifest
from agentlightning.environments.harbor.trial import run_trial
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.litagent.process import Captured
from tests.deploy.schema import check
from tests.environments.harbor_tasks import run_in_a_pod, write_task

IMAGE = '[environment]\ndocker_image = "registry.example/tasks:1"\n'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder with the stand-in and its pods, which is the first on PATH."""
    if shutil.which("bwrap") is None or not Path("/usr/bin/python3").exists():
        pytest.skip("bubblewrap or a Python of the system is not installed")
    folder = tmp_path / "cluster"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("kubectl_of_the_tests.py"), folder / "kubectl")
    (folder / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def pods(cluster: Path) -> list[str]:
    return [path.name for path in cluster.glob("pods/*/*")]


def tried(task: Path, **options: Any) -> dict[str, Any]:
    env = agl.load_environment(f"harbor:{task}", engine="kubernetes", **options)

    async def probes() -> dict[str, Any]:
        return {probe.by: probe.why or probe.reward async for probe in env.probes(env.tasks())}

    return asyncio.run(probes())


def test_a_pod_has_the_limits_of_its_task_and_an_end() -> None:
    section = EnvironmentSection(docker_image="x:1", cpus=2, memory=512, storage="2G")  # pyright: ignore[reportCallIssue]
    made = manifest("agl-harbor-x", section)
    template = {"metadata": made["metadata"], "spec": made["spec"]}
    check({"apiVersion": "batch/v1", "kind": "Job", "metadata": made["metadata"], "spec": {"template": template}})
    assert made["spec"]["containers"][0]["resources"]["limits"] == {
        "cpu": "2",
        "memory": "512Mi",
        "ephemeral-storage": "2048Mi",
    }
    assert made["spec"]["activeDeadlineSeconds"] == 86_400
    assert made["spec"]["automountServiceAccountToken"] is False


def test_a_task_is_done_in_a_pod_of_its_namespace(cluster: Path, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        top='artifacts = ["/app/out.txt"]',
        more=IMAGE + 'env = { WORD = "hel\'lo $x", LD_AUDIT = "x.so" }\n[verifier]\nenvironment_mode = "separate"\n',
        solution='#!/bin/sh\n[ "$WORD" = "hel\'lo \\$x" ] && printf hello > out.txt; echo said >&2; exit 3\n',
    )
    (task / "environment" / "Dockerfile").unlink()
    assert tried(task, kubernetes_namespace="tasks") == {"solution": 1.0, "nothing": 0.0}
    assert pods(cluster) == []
    calls = [json.loads(line) for line in (cluster / "calls").read_text().splitlines()]
    assert all("tasks" in words and "LD_AUDIT" not in names for words, names in calls)
    assert "hel'lo" not in json.dumps([words for words, _ in calls])  # no variable stands in a command line


@pytest.mark.slow
def test_a_working_directory_that_the_image_lacks_is_made(cluster: Path, tmp_path: Path) -> None:
    test = "#!/bin/sh\n[ -e /app/deep/out.txt ] && R=1 || R=0\necho $R > /logs/verifier/reward.txt\n"
    task = write_task(tmp_path / "task", more=IMAGE + 'workdir = "/app/deep"\n', test=test)
    assert tried(task) == {"solution": 1.0, "nothing": 0.0}


@pytest.mark.slow
def test_what_an_agent_leaves_in_place_of_files_leads_nowhere(cluster: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    top = 'artifacts = ["/app/out", "/app/link"]'
    task = write_task(tmp_path / "task", top=top, more=IMAGE + '[verifier]\nenvironment_mode = "separate"\n',
        test="#!/bin/sh\n[ ! -e /app/link ] && [ ! -e /app/out/link ] && [ -e /app/out/it ] && R=1 || R=0\n"
        "echo $R > /logs/verifier/reward.txt\n")  # fmt: skip
    env = HarborEnvironment(str(task), engine="kubernetes")

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        script = f"mkdir out; touch out/it; ln -s {secret} link; ln -s {secret} out/link; mkfifo out/pipe"
        return (await box.run(["sh", "-c", script], captured=captured)).exit_code

    assert asyncio.run(run_trial(read_task(task), work, env.settings)).rewards == {"reward": 1.0}


REFUSED: dict[str, tuple[str, str]] = {
    "an image that is to be built": ("", "engine=kubernetes builds no image"),
    "a network that is to be kept": (IMAGE + 'network_mode = "no-network"\n', "NetworkPolicy"),
    "a user": (IMAGE + '[agent]\nuser = "somebody"\n', "somebody"),
    "an image of the verifier": (
        IMAGE + '[verifier]\nenvironment_mode = "separate"\n',
        "verifier.environment.docker_image",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_pod_does_not_have_is_refused(kind: str, cluster: Path, tmp_path: Path) -> None:
    more, words = REFUSED[kind]
    task = write_task(tmp_path / "task", more=more, files={"tests/Dockerfile": "FROM theirs:1\n"})
    with pytest.raises(ConfigError, match=words):
        agl.load_environment(f"harbor:{task}", engine="kubernetes").tasks()


def test_settings_without_effect_are_refused(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)
    with pytest.raises(ConfigError, match="container_options"):
        agl.load_environment(f"harbor:{task}", engine="kubernetes", container_options=["-v"])
    with pytest.raises(ConfigError, match="kubernetes_namespace"):
        agl.load_environment(f"harbor:{task}", engine="bubblewrap", kubernetes_namespace="x")
    with pytest.raises(ConfigError, match="no name of a namespace"):
        agl.load_environment(f"harbor:{task}", engine="kubernetes", kubernetes_namespace="--x")
    (task / "environment" / "docker-compose.yaml").write_text("services: {}\n")
    with pytest.raises(ConfigError, match="not kubernetes"):
        agl.load_environment(f"harbor:{task}", engine="kubernetes").tasks()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="needs kubectl"):
        agl.load_environment(f"harbor:{task}", engine="kubernetes")


def test_a_model_on_loopback_is_refused(cluster: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)
    env = HarborEnvironment(str(task), engine="kubernetes")
    with pytest.raises(ConfigError, match="which no pod reaches"):
        asyncio.run(
            run_trial(
                read_task(task), env.worker_of("nop", read_task(task)), env.settings, endpoint="http://localhost:1/v1"
            )
        )


def test_an_image_that_is_not_there_says_so(cluster: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more='[environment]\ndocker_image = "missing:1"\n')
    assert "ImagePullBackOff: Back-off pulling image" in tried(task)["solution"]
    assert pods(cluster) == []


def test_a_pod_that_is_gone_is_no_exit_of_the_agent(cluster: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)
    env = HarborEnvironment(str(task), engine="kubernetes")

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        shutil.rmtree(cluster / "pods")
        return (await box.run(["true"], captured=captured)).exit_code

    with pytest.raises(ExecutorError, match="not found"):
        asyncio.run(run_trial(read_task(task), work, env.settings))


async def test_a_cancelled_attempt_leaves_no_pod_and_no_process(cluster: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)
    env = HarborEnvironment(str(task), engine="kubernetes")
    begun = asyncio.Event()

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        begun.set()
        return (await box.run(["sh", "-c", "sleep 86396"], captured=captured)).exit_code

    running = asyncio.create_task(run_trial(read_task(task), work, env.settings))
    await begun.wait()
    await asyncio.sleep(1.0)
    assert len(await asyncio.to_thread(pods, cluster)) == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(pods, cluster) == []
    listed = await asyncio.to_thread(subprocess.run, ["ps", "-eo", "args"], capture_output=True, check=True)
    assert b"\nsleep 86396" not in listed.stdout


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_pod(cluster: Path, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)
    with run_in_a_pod(task) as process:
        assert len(pods(cluster)) == 1
        process.kill()
    deadline = time.monotonic() + 30
    while pods(cluster) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert pods(cluster) == []
