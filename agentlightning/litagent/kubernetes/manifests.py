"""`Kubernetes`, the settings of the cluster and of the pods in which a program runs, and from them the Job and the
Secret of an attempt. Pure, but for the names of this process and this machine.

Names derive from the attempt's id: what is made again, because an answer was lost, meets what was made before.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from agentlightning.arguments import explained_class
from agentlightning.errors import AgentError, ConfigError
from agentlightning.types import DEFAULT_TIMEOUT_SECONDS, AttemptedRollout

CONTAINER = "program"
ATTEMPT = "agentlightning/attempt-id"
JOB, RUNNER, PROCESS = "agentlightning/job", "agentlightning/runner", "agentlightning/process"
"""Labels: the Job of a pod, and the runner and the process that made a Job."""
WORKSPACE, GIVEN, REWARD_FILE = "/workspace", "/run/agl", "/dev/termination-log"
"""Inside the pod. The reward's file is the one that Kubernetes hands back with the exit code, 4 KiB of it."""
LARGEST = 900_000
"""Bytes of what one command may be given: a Secret holds 1 MiB."""
LATE_SECONDS = 60.0
"""How much later than the runner the cluster ends an attempt, for attempts whose runner is gone."""
KEPT_SECONDS = 300
"""How long the cluster keeps a Job that ended and that no runner has deleted."""


ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds its credentials for the API server of its cluster."""
_SET_HERE = frozenset({"containers", "restartPolicy", "securityContext", "automountServiceAccountToken", "volumes"})


@explained_class
@dataclass(frozen=True, slots=True)
class Kubernetes:
    """Runs each attempt of a program as a Job of a cluster:

        Program(["python", "/app/agent.py"], isolation=Kubernetes("registry.example/my-agent:1"))

    The pod has no service account, no capabilities and no way to get any, a user that is not root, and a root file
    system that it can only read. It writes to its working directory, `/workspace`, and to `/tmp`.
    """

    image: str
    """The container image, which holds the program and its files."""
    namespace: str | None = None
    """None: that of the runner's own pod; `default` for a runner that is in none."""
    server: str | None = None
    """URL of the API server, such as that of `kubectl proxy`. None: that of the cluster whose pod the runner is."""
    cpu: str = "1"
    """The most that a pod may use, as Kubernetes writes quantities; the next three are written the same way."""
    cpu_request: str = "100m"
    """The share of a CPU that is reserved for a pod: agents mostly wait for their model."""
    memory: str = "1Gi"
    storage: str = "1Gi"
    """Of `/workspace` and of `/tmp`, and of both together with the log."""
    user: int = 65534
    """The user and the group that the program runs as; not 0."""
    read_only_root: bool = True
    """Whether all but `/workspace` and `/tmp` is read-only."""
    start_seconds: float = 300.0
    """An attempt whose program does not run by then ends as `infra_error`."""
    pod: Mapping[str, Any] = field(default_factory=dict)
    """More of the pod's specification: `runtimeClassName`, `nodeSelector`, `imagePullSecrets`, …"""

    def __post_init__(self) -> None:
        if not self.image:
            raise ConfigError("Kubernetes needs the image that holds the program: Kubernetes('registry/my-agent:1').")
        if self.user <= 0:
            raise ConfigError(f"Kubernetes(user={self.user}): a program does not run as root there. Give another user.")
        if taken := sorted(_SET_HERE & set(self.pod)):
            raise ConfigError(f"Kubernetes(pod=…) holds {', '.join(taken)}, which isolate the program. Leave them out.")


def server_of(cluster: Kubernetes) -> tuple[str, bool]:
    """The URL of the API server, and whether it is that of the cluster whose pod we are.

    Raises ConfigError where none is known.
    """
    if cluster.server:
        return cluster.server.rstrip("/"), False
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host or not (ACCOUNT / "token").is_file():
        raise ConfigError(
            "This process is not in a pod of a cluster, or its pod has no service account. Elsewhere start "
            "`kubectl proxy` and give its address: Kubernetes(…, server='http://127.0.0.1:8001')."
        )
    return f"https://{f'[{host}]' if ':' in host else host}:{port}", True


@dataclass(frozen=True, slots=True)
class AttemptWork:
    """One command of one attempt, and what it is given."""

    rollout_id: str
    attempt_id: str
    part: Literal["program", "grader"]
    command: Sequence[str]
    environment: Mapping[str, str]
    given: bytes
    """The task, or the input of a grader: a file in the pod."""
    stdin: bool
    """The file is also the standard input; takes a shell in the image."""
    seconds: float
    """The attempt's time limit."""

    def __post_init__(self) -> None:
        size = len(self.given) + sum(len(value.encode()) for value in self.environment.values())
        if size > LARGEST:
            raise AgentError(f"The {self.part} is to be given {size:,} bytes, and a Secret holds {LARGEST:,}.")

    @classmethod
    def of(
        cls,
        rollout: AttemptedRollout,
        part: Literal["program", "grader"],
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        stdin: bytes,
    ) -> AttemptWork:
        """The work that would run in this folder of ours, with the task, which may be a file in it."""
        task = folder / ".agl" / "task.json"
        given = stdin or (task.read_bytes() if task.exists() else b"")
        own = {n: v for n, v in environment.items() if n not in ("AGL_TASK_FILE", "AGL_REWARD_FILE")}
        seconds = rollout.config.timeout_seconds or DEFAULT_TIMEOUT_SECONDS
        attempt_id = rollout.attempt.attempt_id
        return cls(rollout.rollout_id, attempt_id, part, command, own, given, bool(stdin), seconds)

    @property
    def name(self) -> str:
        """The name of the Job and of the Secret."""
        return f"agl-{label(self.attempt_id)}" + ("" if self.part == "program" else "-grader")


def job_of(cluster: Kubernetes, work: AttemptWork, owner: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The Job; it goes when its owner goes."""
    labels = {
        "app.kubernetes.io/part-of": "agentlightning",
        "app.kubernetes.io/component": "attempt",
        "agentlightning/rollout": label(work.rollout_id),
        "agentlightning/attempt": label(work.attempt_id),
        JOB: work.name,
    }
    exact = {"agentlightning/rollout-id": work.rollout_id, ATTEMPT: work.attempt_id}
    ours = {RUNNER: runner(), PROCESS: process(os.getpid())}
    metadata: dict[str, Any] = {"name": work.name, "labels": labels | ours, "annotations": exact}
    if owner is not None:
        metadata["ownerReferences"] = [dict(owner)]
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata,
        "spec": {
            "backoffLimit": 0,
            "activeDeadlineSeconds": int(work.seconds + LATE_SECONDS),
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": labels, "annotations": exact}, "spec": _pod(cluster, work)},
        },
    }


def _pod(cluster: Kubernetes, work: AttemptWork) -> dict[str, Any]:
    volume = {"emptyDir": {"sizeLimit": cluster.storage}}
    return {
        "terminationGracePeriodSeconds": 2,
        "enableServiceLinks": False,
        **cluster.pod,
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": cluster.user,
            "runAsGroup": cluster.user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(cluster, work)],
        "volumes": [
            {"name": "workspace", **volume},
            {"name": "tmp", **volume},
            {"name": "given", "secret": {"secretName": work.name, "items": [{"key": "given", "path": "task.json"}]}},
        ],
    }


def _container(cluster: Kubernetes, work: AttemptWork) -> dict[str, Any]:
    task = f"{GIVEN}/task.json"
    plain = {"HOME": WORKSPACE, "AGL_REWARD_FILE": REWARD_FILE} | ({"AGL_TASK_FILE": task} if work.given else {})
    secret = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": work.name, "key": f"env.{name}"}}}
        for name in work.environment
    ]
    command = ["/bin/sh", "-c", f'exec "$@" < {task}', "sh", *work.command] if work.stdin else work.command
    limits = {"cpu": cluster.cpu, "memory": cluster.memory, "ephemeral-storage": cluster.storage}
    return {
        "name": CONTAINER,
        "image": cluster.image,
        "command": [part.replace("$", "$$") for part in command],  # else $(NAME) and $$ are the cluster's to replace
        "workingDir": WORKSPACE,
        "env": [*({"name": n, "value": v} for n, v in plain.items() if n not in work.environment), *secret],
        "resources": {"limits": limits, "requests": {**limits, "cpu": cluster.cpu_request}},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": cluster.read_only_root,
        },
        "terminationMessagePath": REWARD_FILE,
        "terminationMessagePolicy": "File",
        "volumeMounts": [
            {"name": "workspace", "mountPath": WORKSPACE},
            {"name": "tmp", "mountPath": "/tmp"},
            {"name": "given", "mountPath": GIVEN, "readOnly": True},
        ],
    }


def secret_of(work: AttemptWork, job: Mapping[str, Any]) -> dict[str, Any]:
    """What the command is given, with the attempt's key; it goes when the Job goes."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": work.name, "uid": job["metadata"]["uid"]}
    data = {"given": work.given} | {f"env.{name}": value.encode() for name, value in work.environment.items()}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": work.name, "labels": job["metadata"]["labels"], "ownerReferences": [owner]},
        "immutable": True,
        "data": {name: b64encode(value).decode() for name, value in data.items()},
    }


def label(text: str) -> str:
    """The text where it may be part of a name in Kubernetes, else a digest of it."""
    fits = re.fullmatch(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?", text)
    return text if fits else hashlib.sha256(text.encode()).hexdigest()[:32]


def runner() -> str:
    """Whose Jobs these are: the pod's that the runner is in, or those of processes that this one can see.

    Other machines may have the same name, and other containers of this machine count their processes from 1 too.
    """
    return label(os.environ.get("AGL_POD_UID") or f"{socket.gethostname()} {_processes_here()}")


def _processes_here() -> str:
    """A name for this machine since its start, and for the container."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # this system does not say
        return "unknown"


def process(pid: int) -> str:
    """A process of this machine by a name that no later one has: its id, and when it began."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:  # it is gone, or this system does not say
        began = "unknown"
    return f"{pid}-{began}"
