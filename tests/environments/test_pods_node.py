"""Tasks of Harbor in pods of a real cluster: a kubelet, containerd and runc run them (`scripts/kubernetes_node.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import agentlightning as agl
from agentlightning.environments.harbor import HarborEnvironment
from agentlightning.environments.harbor.format import read_task
from agentlightning.environments.harbor.trial import run_trial
from agentlightning.errors import ExecutorError
from agentlightning.litagent.process import Captured
from agentlightning.types.ids import random_hex
from tests.environments.harbor_tasks import run_in_a_pod, write_task

RUN = Path(os.environ.get("AGL_TEST_KUBERNETES_NODE", ""))
needs_node = pytest.mark.skipif("AGL_TEST_KUBERNETES_NODE" not in os.environ, reason="needs `make test-kubernetes`")
pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(300), needs_node]

IMAGE = '[environment]\ndocker_image = "agent:1"\nworkdir = "/app"\n'
"""Its user is root, as that of most tasks."""
OPEN: dict[str, Any] = {
    "apiVersion": "policy/v1beta1",
    "kind": "PodSecurityPolicy",
    "metadata": {
        "name": "a-root-in-its-container",
        "annotations": {"seccomp.security.alpha.kubernetes.io/allowedProfileNames": "*"},
    },
    "spec": {
        "volumes": ["*"],
        "allowPrivilegeEscalation": True,
        **{name: {"rule": "RunAsAny"} for name in ("runAsUser", "seLinux", "supplementalGroups", "fsGroup")},
    },
}


def kubectl(*arguments: str, given: Any = None) -> str:
    stdin = None if given is None else json.dumps(given)
    done = subprocess.run(["kubectl", *arguments], input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def access() -> Iterator[None]:
    """The cluster's `kubectl` is the first on PATH, and a pod may have the root that its image has."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", f"{RUN.parent / 'tools' / 'usr' / 'bin'}:{os.environ['PATH']}")
        patch.setenv("KUBECONFIG", str(RUN / "admin.json"))
        kubectl("create", "-f", "-", given=OPEN)
        yield
        kubectl("delete", "podsecuritypolicy", OPEN["metadata"]["name"])


@pytest.fixture
def namespace(access: None) -> Iterator[str]:
    name = f"agl-{random_hex(4)}"
    kubectl("create", "namespace", name)
    until(lambda: kubectl("get", "serviceaccounts", "-n", name, "-o", "name"), 30)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


def pods(namespace: str) -> list[str]:
    return kubectl("get", "pods", "-n", namespace, "-o", "name").split()


def until(holds: Any, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.5)


def environment(task: Path, namespace: str) -> HarborEnvironment:
    return HarborEnvironment(str(task), engine="kubernetes", kubernetes_namespace=namespace)


def tried(env: Any) -> dict[str, Any]:
    async def probes() -> dict[str, Any]:
        return {probe.by: probe.why or probe.reward async for probe in env.probes(env.tasks())}

    return asyncio.run(probes())


def test_a_task_is_solved_in_a_pod_and_graded_in_another(namespace: str, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        top='artifacts = ["/app/out.txt"]',
        more=IMAGE + 'env = { WORD = "hel\'lo $x" }\n[verifier]\nenvironment_mode = "separate"\n',
        solution='#!/bin/sh\n[ "$WORD" = "hel\'lo \\$x" ] && printf hello > out.txt\n',
    )
    env = agl.load_environment(f"harbor:{task}", engine="kubernetes", kubernetes_namespace=namespace)
    assert tried(env) == {"solution": 1.0, "nothing": 0.0}
    until(lambda: not pods(namespace), 60)


def test_what_a_task_may_have_of_its_machine_is_the_pods_limit(namespace: str, tmp_path: Path) -> None:
    greedy = "#!/bin/sh\npython3 -c 'x = bytearray(200_000_000); print(len(x))' && printf hello > out.txt\n"
    modest = write_task(tmp_path / "modest", more=IMAGE + "memory_mb = 64\n", solution=greedy)
    ample = write_task(tmp_path / "ample", more=IMAGE + "memory_mb = 512\n", solution=greedy)
    assert tried(environment(ample, namespace))["solution"] == 1.0
    assert tried(environment(modest, namespace))["solution"] != 1.0


def test_what_an_agent_leaves_in_place_of_files_leads_nowhere(namespace: str, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("1")
    task = write_task(
        tmp_path / "task",
        top='artifacts = ["/app/out", "/app/link"]',
        more=IMAGE + '[verifier]\nenvironment_mode = "separate"\n',
        test="#!/bin/sh\n[ ! -e /app/link ] && [ ! -e /app/out/link ] && [ -e /app/out/it ] && R=1 || R=0\n"
        "echo $R > /logs/verifier/reward.txt\n",
    )

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        script = f"mkdir out; touch out/it; ln -s {secret} link; ln -s {secret} out/link; mkfifo out/pipe"
        return (await box.run(["sh", "-c", script], captured=captured)).exit_code

    trial = run_trial(read_task(task), work, environment(task, namespace).settings)
    assert asyncio.run(trial).rewards == {"reward": 1.0}


def test_an_artifact_with_patterns_needs_a_tar_that_knows_them(namespace: str, tmp_path: Path) -> None:
    task = write_task(
        tmp_path / "task",
        top='artifacts = [{ source = "/app/out", exclude = ["*.log", "deep/cache"] }]',
        more=IMAGE + '[verifier]\nenvironment_mode = "separate"\n',
        solution="#!/bin/sh\nmkdir -p out/deep/cache; touch out/deep/it out/deep/cache/x out/deep/a.log\n",
    )
    why = tried(environment(task, namespace))["solution"]
    assert "need a tar with --exclude" in why, "busybox has another"
    assert "unrecognized option" in why


def test_an_image_that_is_not_there_says_so(namespace: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more='[environment]\ndocker_image = "missing:1"\n')
    assert "Image" in tried(environment(task, namespace))["solution"]
    until(lambda: not pods(namespace), 60)


def test_a_pod_that_is_gone_is_no_exit_of_the_agent(namespace: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        running = asyncio.create_task(box.run(["sleep", "600"], captured=captured))
        await asyncio.sleep(2.0)
        delete = ["delete", "pod", "--all", "-n", namespace, "--now", "--wait=false"]
        await asyncio.to_thread(kubectl, *delete)
        return (await running).exit_code

    with pytest.raises(ExecutorError):
        asyncio.run(run_trial(read_task(task), work, environment(task, namespace).settings))


async def test_a_cancelled_attempt_leaves_no_pod(namespace: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)
    begun = asyncio.Event()

    async def work(box: Any, stage: Any, captured: Captured) -> int:
        begun.set()
        return (await box.run(["sleep", "86396"], captured=captured)).exit_code

    running = asyncio.create_task(run_trial(read_task(task), work, environment(task, namespace).settings))
    await begun.wait()
    await asyncio.sleep(1.0)
    assert len(await asyncio.to_thread(pods, namespace)) == 1
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.to_thread(until, lambda: not pods(namespace), 60)


def test_a_run_that_is_killed_leaves_no_pod(namespace: str, tmp_path: Path) -> None:
    task = write_task(tmp_path / "task", more=IMAGE)
    with run_in_a_pod(task, namespace) as process:
        assert len(pods(namespace)) == 1
        process.kill()
    until(lambda: not pods(namespace), 60)


async def test_eight_attempts_at_once(namespace: str, tmp_path: Path) -> None:
    task = read_task(write_task(tmp_path / "task", more=IMAGE))
    env = environment(task.folder, namespace)
    works = [env.worker_of(name, task) for name in ("oracle", "nop") * 4]
    done = await asyncio.gather(*(run_trial(task, work, env.settings) for work in works))
    assert [trial.rewards for trial in done] == [{"reward": 1.0}, {"reward": 0.0}] * 4
    await asyncio.to_thread(until, lambda: not pods(namespace), 60)
