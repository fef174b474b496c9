"""Programs as Jobs of a real cluster: a kubelet, containerd and runc run them (`scripts/kubernetes_node.py`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import AgentLightningError
from agentlightning.gateway import Gateway
from agentlightning.litagent import Program
from agentlightning.litagent.kubernetes import attempt
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import Outcome
from agentlightning.types.ids import random_hex
from tests.gateway.conftest import rendering  # noqa: F401
from tests.gateway.scripted import ScriptedEngine
from tests.litagent.cluster.admin import Admin
from tests.litagent.cluster.kubelet import MERGE
from tests.litagent.cluster.place import RESOURCES, Place
from tests.litagent.test_isolation import ASK, POST_REWARD
from tests.litagent.test_kubernetes import READERS

RUN = Path(os.environ.get("AGL_TEST_KUBERNETES_NODE", ""))
"""Where the cluster writes the ids of its processes."""
URL, NODE = "http://127.0.0.1:8001", "10.211.0.1"
needs_node = pytest.mark.skipif("AGL_TEST_KUBERNETES_NODE" not in os.environ, reason="needs `make test-kubernetes`")
pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(180), needs_node]


@pytest.fixture
async def place() -> AsyncIterator[Place]:
    namespace, store = f"agl-{random_hex(4)}", InMemoryLightningStore()
    await store.add_resources(RESOURCES)
    attempt._looked.clear()
    async with aiohttp.ClientSession() as http:
        admin = Admin(http, URL, namespace)
        await admin.prepare()
        place = Place(URL, namespace, admin, store)
        yield place
        await place.until_empty(120)  # a kubelet takes its time
    await store.close()


def program(place: Place, command: Any, settings: Any = None, **options: Any) -> Program:
    return Program(command, isolation=place.isolation(**(settings or {})), **options)


def sh(code: str) -> list[str]:
    return ["/bin/sh", "-c", code]


def python(code: str) -> list[str]:
    return ["python3", "-c", code]


def pid_of(part: str) -> int:
    return int((RUN / f"{part}.pid").read_text())


@pytest.mark.parametrize("task_as", list(READERS))
async def test_the_task_arrives_and_the_last_line_rewards(place: Place, task_as: Any) -> None:
    agent = program(place, python(f"{READERS[task_as]}; print('thinking'); print(task['x'] * 2)"), task_as=task_as)
    rollout = await place.run(agent, {"x": 3})
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert await place.reward(rollout) == 6.0
    assert (await place.attributes(rollout))["program.stdout"] == "thinking\n6\n"


HELD = """
import json, os, pathlib
told = dict(line.split(":", 1) for line in open("/proc/self/status"))
def writable(folder):
    try:
        pathlib.Path(folder, "file").write_text("")
    except OSError as error:
        return type(error).__name__ + str(error.errno)
    return True
print(json.dumps({
    "user": [os.getuid(), os.getgid()],
    "capabilities": [told[n].strip().strip("0") for n in ("CapEff", "CapPrm", "CapBnd", "CapInh")],
    "no new privileges": told["NoNewPrivs"].strip(),
    "seccomp": told["Seccomp"].strip(),
    "writable": {folder: writable(folder) for folder in ("/", "/usr", "/run/agl", "/workspace", "/tmp")},
    "account": os.path.exists("/var/run/secrets/kubernetes.io"),
    "cwd": os.getcwd(), "home": os.environ["HOME"],
    "services": [n for n in os.environ if "SERVICE" in n and not n.startswith("KUBERNETES_")],
    "processes": [n for n in os.listdir("/proc") if n.isdigit()] == [str(os.getpid())],
}))
"""


@pytest.mark.parametrize("read_only_root", [True, False])
async def test_a_program_is_held(place: Place, read_only_root: bool) -> None:
    seen: list[Any] = []

    def grade(run: Any) -> float:
        seen.append(__import__("json").loads(run.stdout))
        return 1.0

    agent = program(place, python(HELD), {"read_only_root": read_only_root}, grader=grade)
    rollout = await place.run(agent, 1)
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    (held,) = seen
    assert held["user"] == [65534, 65534]
    assert held["capabilities"] == [""] * 4
    assert (held["no new privileges"], held["seccomp"]) == ("1", "2")
    refused = "OSError30" if read_only_root else "PermissionError13"
    assert held["writable"] == {
        "/": refused,
        "/usr": refused,
        "/run/agl": "OSError30",
        "/workspace": True,
        "/tmp": True,
    }
    assert (held["cwd"], held["home"], held["account"]) == ("/workspace", "/workspace", False)
    assert held["services"] == []
    assert held["processes"]


async def test_a_command_arrives_as_it_was_given(place: Place) -> None:
    asked = "$$ $HOME $(HOME) $(hostname) $"
    rollout = await place.run(program(place, [*sh('echo "$1"; echo 1'), "sh", asked]), 1)
    assert (await place.attributes(rollout))["program.stdout"] == f"{asked}\n1\n"


async def test_the_reward_may_come_in_a_file(place: Place) -> None:
    agent = program(place, sh('echo talk >&2; echo \'{"reward": 0.5}\' > "$AGL_REWARD_FILE"'), reward="file")
    assert await place.reward(await place.run(agent)) == 0.5


ENDS: dict[str, tuple[list[str], dict[str, Any], Outcome, str]] = {
    "exit code": (sh("echo well; echo 'no such file' >&2; exit 3"), {}, Outcome.AGENT_ERROR, "no such file"),
    "no such program": (["no-such-program"], {}, Outcome.AGENT_ERROR, "could not be started in its image"),
    "out of memory": (
        python("bytearray(10**8)"),
        {"memory": "64Mi"},
        Outcome.AGENT_ERROR,
        "more memory",
    ),
    "a child out of memory": (
        sh("python3 -c 'bytearray(10**8)'; echo 1"),
        {"memory": "64Mi"},
        Outcome.OK,
        "",
    ),
    "workspace full": (
        sh("head -c 30000000 /dev/zero > file; sleep 60"),
        {"storage": "10Mi"},
        Outcome.AGENT_ERROR,
        "more than its pod may hold",
    ),
    "log full": (
        sh("head -c 30000000 /dev/zero | tr '\\0' '\\n'; sleep 60"),
        {"storage": "10Mi"},
        Outcome.AGENT_ERROR,
        "more than its pod may hold",
    ),
    "no image": (sh("echo 1"), {"image": "missing:1"}, Outcome.INFRA_ERROR, "ImagePullBackOff"),
    "pulled always": (sh("echo 1"), {"image": "agent"}, Outcome.INFRA_ERROR, "ImagePullBackOff"),
    "no valid image": (sh("echo 1"), {"image": "MISSING:1"}, Outcome.INFRA_ERROR, "InvalidImageName"),
    "no node": (sh("echo 1"), {"memory": "999Gi", "start_seconds": 1.0}, Outcome.INFRA_ERROR, "Insufficient memory"),
    "slow": (sh("echo 1"), {"image": "missing:1", "start_seconds": 0.5}, Outcome.INFRA_ERROR, "did not run after"),
}


@pytest.mark.parametrize("end", ENDS)
async def test_each_end_of_a_pod_is_the_agents_or_the_clusters(place: Place, end: str) -> None:
    command, settings, outcome, words = ENDS[end]
    rollout = await place.run(program(place, command, settings), seconds=50.0)
    assert rollout.attempt.outcome is outcome, rollout.attempt.error
    assert words in (rollout.attempt.error or "")


async def test_a_program_out_of_time_is_deleted_and_its_log_is_kept(place: Place) -> None:
    rollout = await place.run(program(place, sh("echo so far; sleep 60")), seconds=6)
    assert rollout.attempt.outcome is Outcome.TIMEOUT
    assert (await place.attributes(rollout))["program.stdout"] == "so far\n"


async def test_the_clusters_own_deadline_is_a_timeout_too(place: Place) -> None:
    running = asyncio.create_task(place.run(program(place, sh("sleep 60"))))
    await place.until_running()
    (job,) = await place.admin.all("jobs")
    await place.admin.change("jobs", job["metadata"]["name"], {"spec": {"activeDeadlineSeconds": 1}})
    assert (await running).attempt.outcome is Outcome.TIMEOUT


@pytest.mark.parametrize("kind", ["jobs", "pods"])
async def test_what_somebody_deletes_is_not_the_agents_failure(place: Place, kind: str) -> None:
    running = asyncio.create_task(place.run(program(place, sh("sleep 60"))))
    pod = await place.until_running()
    await place.admin.delete(kind, pod.rpartition("-")[0] if kind == "jobs" else pod)
    rollout = await running
    assert rollout.attempt.outcome is Outcome.INFRA_ERROR, rollout.attempt.error


async def test_stopping_the_runner_deletes_the_job(place: Place) -> None:
    running = asyncio.create_task(place.run(program(place, sh("sleep 60"))))
    await place.until_running()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (rollout,) = await place.store.query_rollouts()
    assert (await place.rollout(rollout.rollout_id)).attempt.outcome is Outcome.CANCELLED


async def test_of_a_long_log_the_beginning_and_the_end_are_kept(place: Place) -> None:
    code = (
        "import sys; print('first'); [print('x' * 99) for _ in range(80_000)]; print('said', file=sys.stderr); print(4)"
    )
    rollout = await place.run(program(place, python(code)))
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert await place.reward(rollout) == 4.0
    text = (await place.attributes(rollout))["program.stdout"]
    assert text.startswith("first\n")
    assert text.endswith("4\n")


@pytest.mark.parametrize("part", ["kubelet", "containerd", "kube-apiserver", "etcd", "kube-controller-manager"])
async def test_a_part_of_the_cluster_that_is_killed_ends_no_attempt(place: Place, part: str) -> None:
    agent = program(place, sh("for i in $(seq 12); do echo $i; sleep 1; done"))
    running = asyncio.create_task(place.run(agent))
    await place.until_running()
    os.kill(pid_of(part), signal.SIGKILL)
    rollout = await running
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert await place.reward(rollout) == 12.0
    assert (await place.attributes(rollout))["program.stdout"].split() == [str(n) for n in range(1, 13)]


@asynccontextmanager
async def another_node() -> AsyncIterator[None]:
    """One that is well and takes no pods: where no node is well, a cluster waits for them and ends nothing."""
    async with aiohttp.ClientSession() as http:

        async def tell() -> None:
            while True:
                now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": ""}
                ready |= {"lastHeartbeatTime": now, "lastTransitionTime": now}
                change = {"status": {"conditions": [ready]}}
                async with http.patch(f"{URL}/api/v1/nodes/other/status", json=change, headers=MERGE) as response:
                    assert response.status == 200, await response.text()
                await asyncio.sleep(5)

        other = {"metadata": {"name": "other"}, "spec": {"unschedulable": True}}
        async with http.post(f"{URL}/api/v1/nodes", json=other) as response:
            assert response.status == 201, await response.text()
        telling = asyncio.create_task(tell())
        yield
        assert not telling.done(), telling.result()
        telling.cancel()
        await http.delete(f"{URL}/api/v1/nodes/other")


async def test_a_node_that_is_gone_is_not_the_agents_failure(place: Place) -> None:
    """After 40 s its pods are asked to go, five minutes later unless they say otherwise."""
    soon = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 1}
    agent = program(place, sh("sleep 200"), {"pod": {"tolerations": [soon]}})
    async with another_node():
        running = asyncio.create_task(place.run(agent, seconds=140.0))
        await place.until_running()
        os.kill(pid_of("kubelet"), signal.SIGSTOP)
        try:
            rollout = await running
        finally:
            os.kill(pid_of("kubelet"), signal.SIGCONT)
    assert rollout.attempt.outcome is Outcome.INFRA_ERROR, rollout.attempt.error
    assert "was deleted" in (rollout.attempt.error or "")


MAKE = """
import asyncio, sys
from pathlib import Path
from agentlightning.litagent import Kubernetes, Limits
from agentlightning.litagent.kubernetes import AttemptWork, run_job
work = AttemptWork("ro-1", "at-1", "program", ["sleep", "300"], {}, b"", False, 600.0)
here = Kubernetes("agent:1", server=sys.argv[1], namespace=sys.argv[2])
asyncio.run(run_job(here, work, folder=Path("."), limits=Limits()))
"""


async def test_what_a_runner_that_was_killed_left_is_deleted_by_the_next(place: Place) -> None:
    runner = await asyncio.create_subprocess_exec(sys.executable, "-c", MAKE, URL, place.namespace)
    left = await place.until_running()
    runner.kill()
    await runner.wait()
    rollout = await place.run(program(place, sh("echo 1")))
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    async with asyncio.timeout(60):
        while left in [pod["metadata"]["name"] for pod in await place.admin.all("pods")]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)


async def test_many_at_once_leave_nothing(place: Place) -> None:
    agent = program(place, python(f"{READERS['stdin']}; print(task)"))
    rollouts = await asyncio.gather(*[place.run(agent, n) for n in range(16)])
    assert [r.attempt.error for r in rollouts] == [None] * 16
    assert [await place.reward(r) for r in rollouts] == [float(n) for n in range(16)]


@pytest.mark.parametrize("reward", ["last_line", "http"])
async def test_it_asks_the_gateway(place: Place, rendering: Any, reward: Any) -> None:  # noqa: F811
    engine = ScriptedEngine(rendering, lambda *_: "7")
    async with Gateway(place.store, engine, rendering, host=NODE) as gateway:
        runner = LitAgentRunner(DummyTracer(), gateway=gateway)
        runner.init(program(place, python(ASK if reward == "last_line" else POST_REWARD), reward=reward))
        runner.init_worker(0, place.store)
        with suppress(AgentLightningError):
            await runner.step(7, resources={"llm": gateway.as_resource()})
        runner.teardown()
    (rollout,) = await place.store.query_rollouts()
    found = await place.rollout(rollout.rollout_id)
    assert found.attempt.outcome is Outcome.OK, found.attempt.error
    assert await place.reward(found) == 7.0
    calls = await place.store.query_calls([rollout.rollout_id])
    assert len(calls.get(rollout.rollout_id, [])) == (reward == "last_line")
