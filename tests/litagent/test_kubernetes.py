"""Programs as Jobs of a cluster: what they are given, how each end is told, and that nothing of them stays.

The API server is one in memory (`cluster/api_server.py`), or with AGL_TEST_KUBERNETES a real one at that address, which
is that of `kubectl proxy` with an account that may do everything. Its controllers must run, and no node: what pods run
are processes of this machine either way (`cluster/kubelet.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from agentlightning.errors import AgentLightningError, ConfigError, ExecutorError
from agentlightning.gateway import Gateway
from agentlightning.litagent import Kubernetes, Limits, Program, ProgramRun
from agentlightning.litagent.kubernetes import api, attempt, manifests
from agentlightning.litagent.kubernetes.attempt import run_job
from agentlightning.litagent.kubernetes.manifests import AttemptWork, job_of, process
from agentlightning.runner import LitAgentRunner
from agentlightning.store import InMemoryLightningStore
from agentlightning.tracer import DummyTracer
from agentlightning.types import Outcome
from agentlightning.types.ids import random_hex
from tests.gateway.conftest import rendering  # noqa: F401
from tests.gateway.scripted import ScriptedEngine
from tests.litagent.cluster.admin import Admin
from tests.litagent.cluster.api_server import ApiServer
from tests.litagent.cluster.kubelet import Kubelet
from tests.litagent.cluster.place import KEY, RESOURCES, Place
from tests.litagent.test_isolation import ASK, POST_REWARD

PAGE = Path(__file__).parents[2] / "docs" / "kubernetes.md"
REAL = os.environ.get("AGL_TEST_KUBERNETES")


@dataclass
class Cluster(Place):
    """One without containers."""

    kubelet: Kubelet
    server: ApiServer
    """The one in memory; it is not asked anything where there is a real one."""


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    server, store = ApiServer(), InMemoryLightningStore()
    url, namespace = REAL or await server.start(), f"agl-{random_hex(4)}"
    kubelet = Kubelet(url, tmp_path, namespace)
    server.log_of = lambda pod: bytes(kubelet.logs[pod])
    node = None
    await store.add_resources(RESOURCES)
    attempt._looked.clear()
    async with aiohttp.ClientSession() as http:
        admin = Admin(http, url, namespace)
        if REAL:
            await admin.prepare()
            node = await kubelet.join(certificate(tmp_path))
        running = asyncio.create_task(kubelet.run())
        yield Cluster(url, namespace, admin, store, kubelet, server)
    assert not running.done(), running.result()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await (node.cleanup() if node else server.stop())
    await store.close()


def certificate(folder: Path) -> Path:
    """Of nobody in particular, with its key in the same file."""
    file = folder / "node.pem"
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "-", "-out", "-"]
    made += ["-subj", "/CN=node", "-addext", "subjectAltName=IP:127.0.0.1"]
    file.write_bytes(subprocess.run(made, check=True, capture_output=True).stdout)
    return file


def sh(code: str) -> list[str]:
    return ["/bin/sh", "-c", code]


def python(code: str) -> list[str]:
    return [sys.executable, "-S", "-c", code]


READERS = {
    "stdin": "import json, sys; task = json.load(sys.stdin)",
    "file": "import json, os; task = json.load(open(os.environ['AGL_TASK_FILE']))",
    "env": "import json, os; task = json.loads(os.environ['AGL_TASK'])",
}


@pytest.mark.parametrize("task_as", list(READERS))
async def test_the_task_arrives_and_the_last_line_rewards(cluster: Cluster, task_as: Any) -> None:
    agent = cluster.program(python(f"{READERS[task_as]}; print('thinking'); print(task['x'] * 2)"), task_as=task_as)
    rollout = await cluster.run(agent, {"x": 3})
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert await cluster.reward(rollout) == 6.0
    assert (await cluster.attributes(rollout))["program.stdout"] == "thinking\n6\n"


@pytest.mark.parametrize("task_as", ["stdin", "env"])  # with a shell before it, and without
async def test_a_command_arrives_as_it_was_given(cluster: Cluster, task_as: Any) -> None:
    asked = "$$ $HOME $(HOME) $(hostname) $"
    rollout = await cluster.run(cluster.program([*sh('echo "$1"; echo 1'), "sh", asked], task_as=task_as), 1)
    assert (await cluster.attributes(rollout))["program.stdout"] == f"{asked}\n1\n"


async def test_the_reward_may_come_in_a_file(cluster: Cluster) -> None:
    agent = cluster.program(sh('echo talk >&2; echo \'{"reward": 0.5}\' > "$AGL_REWARD_FILE"'), reward="file")
    assert await cluster.reward(await cluster.run(agent)) == 0.5


async def test_many_at_once_leave_nothing(cluster: Cluster) -> None:
    agent = cluster.program(python(f"{READERS['stdin']}; print(task)"))
    rollouts = await asyncio.gather(*[cluster.run(agent, n) for n in range(8)])
    assert [await cluster.reward(r) for r in rollouts] == [float(n) for n in range(8)]
    await cluster.until_empty()


async def test_the_key_is_in_the_secret_alone_and_the_secret_goes_with_the_job(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_CLOUD_PASSWORD", "hunter2")
    running = asyncio.create_task(cluster.run(cluster.program(sh("sleep 60"), env={"MORE": "yes"}), seconds=4))
    name = await cluster.until_running()
    (job,), (pod,), (secret,) = [await cluster.admin.all(kind) for kind in ("jobs", "pods", "secrets")]
    assert KEY not in json.dumps([job, pod])
    assert secret["metadata"]["ownerReferences"][0]["uid"] == job["metadata"]["uid"]
    given = cluster.kubelet.environments[name]
    assert (given["OPENAI_API_KEY"], given["OPENAI_MODEL"], given["MORE"]) == (KEY, "m", "yes")
    assert given["OPENAI_BASE_URL"] == RESOURCES["llm"].endpoint
    assert "hunter2" not in json.dumps([job, secret])
    assert not {"USER", "VIRTUAL_ENV", "PYTHONPATH"} & set(given)  # the runner's own; the image has its own
    await running
    await cluster.until_empty()


FATES: dict[str, tuple[Outcome, str]] = {
    "oom": (Outcome.AGENT_ERROR, "more memory"),
    "no-such-program": (Outcome.AGENT_ERROR, "could not be started in its image"),
    "greedy": (Outcome.AGENT_ERROR, "more than its pod may hold"),
    "missing": (Outcome.INFRA_ERROR, "ImagePullBackOff"),
    "evicted": (Outcome.INFRA_ERROR, "low on resource"),
    "preempted": (Outcome.INFRA_ERROR, "PreemptionByScheduler"),
    "slow-pull": (Outcome.INFRA_ERROR, "did not run after 1 s. ContainerCreating"),
    "unschedulable": (Outcome.INFRA_ERROR, "did not run after 1 s"),
}


@pytest.mark.parametrize("image", FATES)
async def test_each_end_of_a_pod_is_the_agents_or_the_clusters(cluster: Cluster, image: str) -> None:
    rollout = await cluster.run(cluster.program(sh("echo 1"), image=f"{image}:1", start_seconds=1.0))
    outcome, words = FATES[image]
    assert rollout.attempt.outcome is outcome, rollout.attempt.error
    assert words in (rollout.attempt.error or "")
    assert await cluster.reward(rollout) is None
    await cluster.until_empty()


async def test_a_program_whose_child_ran_out_of_memory_has_ended_well(cluster: Cluster) -> None:
    rollout = await cluster.run(cluster.program(sh("echo 1"), image="childs-oom:1", reward="file"))
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert await cluster.reward(rollout) == 0.5


async def test_a_program_that_fails_is_told_with_the_end_of_its_log(cluster: Cluster) -> None:
    rollout = await cluster.run(cluster.program(sh("echo well; echo 'no such file' >&2; exit 3")))
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert "exit code 3" in (rollout.attempt.error or "")
    assert "no such file" in (rollout.attempt.error or "")


async def test_a_program_out_of_time_is_deleted_and_its_log_is_kept(cluster: Cluster) -> None:
    rollout = await cluster.run(cluster.program(sh("echo so far; sleep 60")), seconds=2)
    assert rollout.attempt.outcome is Outcome.TIMEOUT
    assert (await cluster.attributes(rollout))["program.stdout"] == "so far\n"
    await cluster.until_empty()


async def test_the_clusters_own_deadline_is_a_timeout_too(cluster: Cluster) -> None:
    running = asyncio.create_task(cluster.run(cluster.program(sh("sleep 60"))))
    await cluster.until_running()
    (job,) = await cluster.admin.all("jobs")
    assert job["spec"]["activeDeadlineSeconds"] == 30 + 60
    await cluster.admin.change("jobs", job["metadata"]["name"], {"spec": {"activeDeadlineSeconds": 1}})
    assert (await running).attempt.outcome is Outcome.TIMEOUT


@pytest.mark.parametrize(("kind", "replaced"), [("jobs", False), ("pods", False), ("pods", True)])
async def test_what_somebody_deletes_is_not_the_agents_failure(cluster: Cluster, kind: str, replaced: bool) -> None:
    cluster.server.replaces_pods = replaced
    running = asyncio.create_task(cluster.run(cluster.program(sh("sleep 60"))))
    pod = await cluster.until_running()
    await cluster.admin.delete(kind, pod.rpartition("-")[0] if kind == "jobs" else pod)
    rollout = await running
    assert rollout.attempt.outcome is Outcome.INFRA_ERROR, rollout.attempt.error
    await cluster.until_empty()


async def test_stopping_the_runner_deletes_the_job(cluster: Cluster) -> None:
    running = asyncio.create_task(cluster.run(cluster.program(sh("sleep 60"))))
    await cluster.until_running()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    (rollout,) = await cluster.store.query_rollouts()
    assert (await cluster.rollout(rollout.rollout_id)).attempt.outcome is Outcome.CANCELLED
    await cluster.until_empty()


# ---- an API server in trouble ----------------------------------------------------------------------------------------

TROUBLE: dict[str, tuple[str, str, int, dict[str, str]]] = {
    "an answer is lost": ("POST", "jobs", 0, {}),
    "the Secret's answer is lost": ("POST", "secrets", 0, {}),
    "500": ("POST", "jobs", 500, {}),
    "429": ("GET", "pods", 429, {"Retry-After": "1"}),
    "503 when deleting": ("DELETE", "jobs", 503, {}),
    "the deletion's answer is lost": ("DELETE", "jobs", 0, {}),
    "the log": ("LOG", "pods", 500, {}),
    "a page of a proxy": ("GET", "pods", 200, {}),
    "a watch is refused": ("WATCH", "pods", 410, {}),
    "a watch fails": ("WATCH", "pods", 500, {}),
}


needs_faults = pytest.mark.skipif(bool(REAL), reason="a real API server does not fail when it is told to")


@pytest.mark.slow
@needs_faults
@pytest.mark.parametrize("what", TROUBLE)
async def test_what_a_repeat_heals_is_repeated(cluster: Cluster, what: str) -> None:
    verb, kind, status, headers = TROUBLE[what]
    cluster.server.fault(verb, kind, status, 2, **headers)
    rollout = await cluster.run(cluster.program(sh(f"sleep {1.5 if verb == 'WATCH' else 0.3}; echo 1")))
    assert rollout.attempt.outcome is Outcome.OK, rollout.attempt.error
    assert cluster.server.asked[f"{verb} {kind}"] >= 2
    assert len(cluster.kubelet.logs) == 1  # it ran once
    await cluster.until_empty()


@needs_faults
async def test_a_history_that_is_gone_is_looked_past(cluster: Cluster) -> None:
    running = asyncio.create_task(cluster.run(cluster.program(sh("sleep 1; echo 1"))))
    for _ in range(40):
        cluster.server.forget_history()
        await asyncio.sleep(0.02)
    assert (await running).attempt.outcome is Outcome.OK


@needs_faults
async def test_what_the_cluster_refuses_is_its_failure_and_said(cluster: Cluster) -> None:
    cluster.server.fault("POST", "jobs", 403)
    rollout = await cluster.run(cluster.program(sh("echo 1")))
    assert rollout.attempt.outcome is Outcome.INFRA_ERROR
    assert "made to fail with 403" in (rollout.attempt.error or "")


async def test_a_cluster_that_is_away_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "API_SECONDS", 0.5)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        rollout = await cluster.run(Program(sh("echo 1"), isolation=Kubernetes("agent:1", server=url)))
    assert rollout.attempt.outcome is Outcome.INFRA_ERROR
    assert "cannot be used" in (rollout.attempt.error or "")


async def test_a_job_of_this_name_that_is_not_ours_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    work = AttemptWork("ro-1", "at-1", "program", ["agent"], {}, b"", False, 60.0)
    other = job_of(cluster.isolation("unschedulable:1"), work)
    other["metadata"]["annotations"] = {}
    await cluster.admin.make("jobs", other)
    with pytest.raises(ExecutorError, match="belongs to something else"):
        await run_job(cluster.isolation(), work, folder=tmp_path, limits=Limits())
    assert [job["metadata"]["name"] for job in await cluster.admin.all("jobs")] == ["agl-at-1"]


async def test_jobs_of_a_runner_that_is_gone_are_deleted_and_those_of_others_are_not(cluster: Cluster) -> None:
    for name, whose in (("dead", "999999999-1"), ("again", f"{os.getpid()}-1"), ("alive", process(os.getpid()))):
        job = job_of(
            cluster.isolation("unschedulable:1"), AttemptWork("r", name, "program", ["agent"], {}, b"", False, 60.0)
        )
        job["metadata"]["labels"]["agentlightning/process"] = whose
        await cluster.admin.make("jobs", job)
    assert (await cluster.run(cluster.program(sh("echo 1")))).attempt.outcome is Outcome.OK
    assert [job["metadata"]["name"] for job in await cluster.admin.all("jobs")] == ["agl-alive"]


@needs_faults
async def test_what_others_left_is_looked_for_until_the_cluster_answers(cluster: Cluster) -> None:
    job = job_of(
        cluster.isolation("unschedulable:1"), AttemptWork("r", "dead", "program", ["agent"], {}, b"", False, 60.0)
    )
    job["metadata"]["labels"]["agentlightning/process"] = "999999999-1"
    await cluster.admin.make("jobs", job)
    cluster.server.fault("GET", "jobs", 403)
    assert (await cluster.run(cluster.program(sh("echo 1")))).attempt.outcome is Outcome.INFRA_ERROR
    assert (await cluster.run(cluster.program(sh("echo 1")))).attempt.outcome is Outcome.OK
    await cluster.until_empty()


async def test_another_machine_of_the_same_name_keeps_its_jobs(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(manifests, "_processes_here", lambda: "another boot, other processes")
        work = AttemptWork("r", "alive", "program", ["agent"], {}, b"", False, 60.0)
        job = job_of(cluster.isolation("unschedulable:1"), work)
    job["metadata"]["labels"]["agentlightning/process"] = "999999999-1"  # a number that nobody has here
    await cluster.admin.make("jobs", job)
    assert (await cluster.run(cluster.program(sh("echo 1")))).attempt.outcome is Outcome.OK
    assert [job["metadata"]["name"] for job in await cluster.admin.all("jobs")] == ["agl-alive"]


# ---- graders, and a model --------------------------------------------------------------------------------------------


async def test_a_function_grades_here_and_a_command_in_a_job_of_its_own(cluster: Cluster) -> None:
    seen: list[ProgramRun] = []

    def grade(run: ProgramRun) -> float:
        seen.append(run)
        return float(run.stdout) * run.task

    assert await cluster.reward(await cluster.run(cluster.program(sh("echo 3"), grader=grade), 2)) == 6.0
    assert list(seen[0].workspace.glob("[!.]*")) == []
    command = python("import json, sys, os; r = json.load(sys.stdin); print(float(r['stdout']) + r['task'])")
    agent = cluster.program(sh("echo 3"), grader=command, grader_env={"ANSWERS": "7"})
    assert await cluster.reward(await cluster.run(agent, 2)) == 5.0
    program, grader = list(cluster.kubelet.environments.values())[1:]
    assert ("OPENAI_API_KEY" in program, "ANSWERS" in program) == (True, False)
    assert ("OPENAI_API_KEY" in grader, "ANSWERS" in grader) == (False, True)


@needs_faults
async def test_the_clusters_failure_is_not_the_graders(cluster: Cluster) -> None:
    agent = cluster.program(sh("echo 3"), grader=sh("cat"))

    async def refuse_the_second() -> None:
        while cluster.server.asked["POST secrets"] < 1:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        cluster.server.fault("POST", "jobs", 403)

    rollout, _ = await asyncio.gather(cluster.run(agent), refuse_the_second())
    assert rollout.attempt.outcome is Outcome.INFRA_ERROR, rollout.attempt.error


@pytest.mark.parametrize("reward", ["last_line", "http"])
async def test_it_asks_the_gateway(cluster: Cluster, rendering: Any, reward: Any) -> None:  # noqa: F811
    async with Gateway(cluster.store, ScriptedEngine(rendering, lambda *_: "7"), rendering) as gateway:
        runner = LitAgentRunner(DummyTracer(), gateway=gateway)
        code = ASK if reward == "last_line" else POST_REWARD
        runner.init(cluster.program(python(code), reward=reward))
        runner.init_worker(0, cluster.store)
        with suppress(AgentLightningError):
            await runner.step(7, resources={"llm": gateway.as_resource()})
        runner.teardown()
    (rollout,) = await cluster.store.query_rollouts()
    found = await cluster.rollout(rollout.rollout_id)
    assert found.attempt.outcome is Outcome.OK, found.attempt.error
    assert await cluster.reward(found) == 7.0


async def test_a_runner_in_a_pod_uses_its_account_and_owns_its_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, file = ApiServer(), certificate(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(file)
    url = await server.start(context)
    server.token = "of-the-account"
    for name, text in (("token", "of-the-account\n"), ("ca.crt", file.read_text()), ("namespace", "training")):
        (tmp_path / name).write_text(text)
    for module in (manifests, api):
        monkeypatch.setattr(module, "ACCOUNT", tmp_path)
    host, port = url.removeprefix("https://").split(":")
    variables = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
    for name, value in (variables | {"AGL_POD_NAME": "agl-runner-1", "AGL_POD_UID": "uid-of-it"}).items():
        monkeypatch.setenv(name, value)
    work = AttemptWork("ro-1", "at-1", "program", ["agent"], {}, b"", False, 60.0)
    running = asyncio.create_task(run_job(Kubernetes("unschedulable"), work, folder=tmp_path, limits=Limits()))
    async with asyncio.timeout(10):
        while not server.of("secrets"):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    (job,) = server.of("jobs")
    assert job["metadata"]["namespace"] == "training"
    assert [owner["uid"] for owner in job["metadata"]["ownerReferences"]] == ["uid-of-it"]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert server.of("jobs") == []
    (tmp_path / "namespace").write_text(
        "another"
    )  # an owner elsewhere would be looked for in vain, and the Job deleted
    async with api.ClusterApi.opened(Kubernetes("agent:1", namespace="training")) as opened:
        assert opened.owner is None
    await server.stop()


# ---- what is refused before anything runs ---------------------------------------------------------------------------


def test_what_would_not_isolate_or_have_no_effect_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="as root"):
        Kubernetes("agent:1", user=0)
    with pytest.raises(ConfigError, match="securityContext"):
        Kubernetes("agent:1", pod={"securityContext": {}})
    here = Kubernetes("agent:1", server="http://127.0.0.1:1")
    options: list[dict[str, Any]] = [{"files": tmp_path}, {"workspaces": tmp_path}, {"limits": Limits(cpu_seconds=1)}]
    for option in options:
        with pytest.raises(ConfigError, match=next(iter(option))):
            Program("agent", isolation=here, **option)
    with pytest.raises(ConfigError, match="kubectl proxy"):
        Program("agent", isolation=Kubernetes("agent:1"))


def test_the_page_has_every_setting() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*?)\|", PAGE.read_text(), flags=re.MULTILINE)
    made = {f.name: "" if f.default is MISSING else f"`{f.default!r}`" for f in fields(Kubernetes)}
    assert {name: default.strip() for name, default in rows} == made


async def test_a_task_that_no_secret_holds_is_said(cluster: Cluster) -> None:
    rollout = await cluster.run(cluster.program(sh("cat")), "x" * 1_000_000)
    assert rollout.attempt.outcome is Outcome.AGENT_ERROR
    assert "a Secret holds" in (rollout.attempt.error or "")
