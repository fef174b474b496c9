"""The Helm chart, rendered by Helm's own library: its manifests are what Kubernetes knows, fit each other, and fit the
commands and the Jobs of this package.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer.main
import yaml

from agentlightning.cli.app import app
from agentlightning.litagent import Kubernetes, Limits
from agentlightning.litagent.kubernetes import attempt
from agentlightning.litagent.kubernetes.manifests import AttemptWork, job_of, secret_of
from tests.deploy.schema import check
from tests.litagent.cluster.api_server import ApiServer
from tests.litagent.cluster.kubelet import Kubelet, expanded

pytest.importorskip("helm_python", reason="Helm's library is of the dev extra, on Linux")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "agentlightning"
RENDER = """
import json, sys
from helm_python.chart import Chart
with Chart.load(sys.argv[1]) as chart:
    print(json.dumps(chart.render(json.load(sys.stdin), name="agl", namespace="training")))
"""
AGENT = {"command": "sh -c 'python /app/agent.py $(HOME) $$'", "image": "registry/agent:1"}
EVERYTHING: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "store": {"replicas": 3},
    "gateway": {"replicas": 2, "upstreams": {"gpt": "https://api.example.com/v1"}, "args": ["--model", "calc"]},
    "runner": {**AGENT, "options": {"memory": "2Gi", "user": 1000, "pod": {"runtimeClassName": "gvisor"}}},
    "networkPolicy": {
        "attemptsMayReach": [{"to": [{"podSelector": {"matchLabels": {"app": "trainer"}}}]}],
        "storeClients": [{"podSelector": {"matchLabels": {"app": "trainer"}}}],
    },
    "ingress": {"enabled": True, "host": "models.example.com", "tlsSecret": "tls", "className": "nginx"},
}
WORK = AttemptWork("ro-1", "at-1", "program", ["agent"], {"OPENAI_API_KEY": "key"}, b"{}", True, 60.0)


def rendered(values: Any) -> list[Any]:
    """In a process of its own, because it loads another language's runtime. Raises CalledProcessError."""
    done = subprocess.run(
        [sys.executable, "-c", RENDER, str(CHART)],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [found for text in json.loads(done.stdout).values() for found in yaml.safe_load_all(text) if found]


@pytest.fixture(scope="module", params=["little", "everything"])
def manifests(request: pytest.FixtureRequest) -> list[Any]:
    return rendered(EVERYTHING if request.param == "everything" else {"runner": AGENT})


def of(manifests: list[Any], kind: str) -> dict[str, Any]:
    return {found["metadata"]["name"]: found for found in manifests if found["kind"] == kind}


def pods(manifests: list[Any]) -> dict[str, Any]:
    """The pod templates of the chart, by component."""
    made = [*of(manifests, "Deployment").values(), *of(manifests, "StatefulSet").values()]
    return {found["metadata"]["labels"]["app.kubernetes.io/component"]: found["spec"]["template"] for found in made}


def test_kubernetes_knows_every_field(manifests: list[Any]) -> None:
    assert {found["kind"] for found in manifests} >= {"Deployment", "StatefulSet", "Service", "NetworkPolicy", "Role"}
    for found in manifests:
        check(found)
    job = job_of(Kubernetes("agent:1", pod={"runtimeClassName": "gvisor"}), WORK, {"kind": "Pod", "name": "r"})
    with pytest.raises(jsonschema.ValidationError, match="'apiVersion' is a required property"):
        check(job)  # the owner's; so this looks deep enough to see it
    job = job_of(Kubernetes("agent:1", pod={"runtimeClassName": "gvisor"}), WORK)
    check(job)
    check(secret_of(WORK, {"metadata": {"uid": "1", "labels": {}}}))
    with pytest.raises(jsonschema.ValidationError, match="runtimeClass"):
        check(job_of(Kubernetes("agent:1", pod={"runtimeClass": "gvisor"}), WORK))


@pytest.mark.parametrize("component", ["store", "gateway", "runner", "attempt"])
def test_every_pod_may_run_where_security_is_restricted(manifests: list[Any], component: str) -> None:
    """By what the Pod Security Standard `restricted` demands."""
    job = job_of(Kubernetes("agent:1"), WORK)
    spec = (pods(manifests) | {"attempt": job["spec"]["template"]})[component]["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert {kind for volume in spec["volumes"] for kind in volume if kind != "name"} <= {"emptyDir", "secret"}
    for container in spec["containers"]:
        allowed = container["securityContext"]
        assert (allowed["allowPrivilegeEscalation"], allowed["capabilities"]) == (False, {"drop": ["ALL"]})
        assert allowed["readOnlyRootFilesystem"] is True
    assert spec.get("automountServiceAccountToken", True) is (component == "runner")


def test_services_and_policies_choose_pods_that_there_are(manifests: list[Any]) -> None:
    labels = {name: pod["metadata"]["labels"] for name, pod in pods(manifests).items()}
    for name, service in of(manifests, "Service").items():
        (component,) = {n for n in labels if n in name}
        wanted = dict(service["spec"]["selector"])
        wanted.pop("statefulset.kubernetes.io/pod-name", None)  # the controller's own label
        assert wanted.items() <= labels[component].items()
        ports = {
            port["name"]: port["containerPort"] for port in pods(manifests)[component]["spec"]["containers"][0]["ports"]
        }
        (port,) = service["spec"]["ports"]
        assert ports[port["targetPort"]] == port["port"]
    attempts, store = of(manifests, "NetworkPolicy").values()
    job = job_of(Kubernetes("agent:1"), WORK)
    chosen = attempts["spec"]["podSelector"]["matchLabels"]
    assert chosen.items() <= job["spec"]["template"]["metadata"]["labels"].items()
    assert not any(chosen.items() <= found.items() for found in labels.values())
    gateway, names, *_ = attempts["spec"]["egress"]
    assert attempts["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in attempts["spec"]
    assert gateway["to"] == [{"podSelector": {"matchLabels": labels["gateway"]}}]
    assert gateway["ports"] == [{"protocol": "TCP", "port": 8000}]
    assert {port["port"] for port in names["ports"]} == {53}
    assert store["spec"]["podSelector"]["matchLabels"] == labels["store"]
    let_in = [peer["podSelector"]["matchLabels"] for peer in store["spec"]["ingress"][0]["from"]]
    assert let_in[:2] == [labels["gateway"], labels["runner"]]


def test_the_commands_are_commands_of_ours(manifests: list[Any]) -> None:
    commands = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    for component, pod in pods(manifests).items():
        (container,) = pod["spec"]["containers"]
        name, *arguments = [expanded(argument, {"HOME": "/tmp"}) for argument in container["args"]]
        given = commands[name].make_context(name, arguments).params
        if component == "runner":
            assert (given["agent"], given["isolation"]) == (AGENT["command"], "kubernetes")
            assert given["server"] == "http://agl-store:4747"
            assert "image=registry/agent:1" in given["isolation_option"]
            assert {v["name"] for v in container["env"]} == {"AGL_STORE_KEY", "AGL_POD_NAME", "AGL_POD_UID"}
        else:
            assert given["host"] == "0.0.0.0"
            assert given["port"] == container["ports"][0]["containerPort"]


async def test_a_runner_may_do_what_an_attempt_takes_and_no_more(manifests: list[Any], tmp_path: Path) -> None:
    server = ApiServer()
    url = await server.start()
    kubelet = Kubelet(url, tmp_path)
    server.log_of = lambda pod: bytes(kubelet.logs[pod])
    running = asyncio.create_task(kubelet.run())
    attempt._looked.clear()
    server.fault("POST", "jobs", 0)  # so that it looks for the one that was made
    await attempt.run_job(
        Kubernetes("agent:1", server=url), replace(WORK, command=["cat"]), folder=tmp_path, limits=Limits()
    )
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await server.stop()
    verbs = {"POST": {"create"}, "GET": {"get", "list"}, "WATCH": {"watch"}, "LOG": {"get"}, "DELETE": {"delete"}}
    taken: dict[str, set[str]] = {}
    for request in server.asked:
        verb, kind = request.split()
        taken.setdefault("pods/log" if verb == "LOG" else kind, set()).update(verbs[verb])
    taken["pods"].remove("get")  # it only lists them
    (role,) = of(manifests, "Role").values()
    assert {rule["resources"][0]: set(rule["verbs"]) for rule in role["rules"]} == taken


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "the agent's command"),
        ({"runner": {"command": "agent"}}, "the agent's image"),
        ({"runner": {**AGENT, "comand": "agent"}}, "'comand' not allowed"),
        ({"runner": AGENT, "ingress": {"enabled": True}}, "ingress.host"),
    ],
)
def test_values_that_mean_nothing_or_are_missing_are_refused(values: Any, message: str) -> None:
    with pytest.raises(subprocess.CalledProcessError) as said:
        rendered(values)
    assert message in said.value.stderr
