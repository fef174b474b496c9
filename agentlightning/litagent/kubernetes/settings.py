"""`Kubernetes`: what users say of the cluster and of the pods in which a program runs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
"""Where a pod finds what opens the API server of its cluster."""
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
    """What a pod may use at most, as Kubernetes writes quantities; so are the next three."""
    cpu_request: str = "100m"
    """What is reserved for it: agents mostly wait for their model."""
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
