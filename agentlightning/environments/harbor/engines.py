"""Which engine opens the box of an attempt: podman, docker, bubblewrap or a cluster."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from agentlightning.environments.harbor.boxes import Box, BoxRequest, open_sandbox
from agentlightning.environments.harbor.containers import open_container
from agentlightning.environments.harbor.pods import check_kubectl, open_pod
from agentlightning.environments.harbor.project import open_project
from agentlightning.errors import ConfigError
from agentlightning.litagent.bubblewrap import check_bubblewrap

ENGINES = ("podman", "docker")


def check_engine(name: str | None) -> str:
    """The engine that is taken. Raises ConfigError with what to install where there is none."""
    if name is not None and name not in (*ENGINES, "bubblewrap", "kubernetes"):
        raise ConfigError(f"engine is {name!r}; it can be 'podman', 'docker', 'bubblewrap' or 'kubernetes'.")
    if name == "kubernetes":
        check_kubectl()
        return name
    if name == "bubblewrap":
        check_bubblewrap()
        return name
    for one in (name,) if name else ENGINES:
        if shutil.which(one) is not None:
            return one
    raise ConfigError(
        f"There is no {name or 'podman or docker'} here, in which tasks run. On Debian: apt-get install podman. Tasks "
        "that need no more than this machine's programs run in a sandbox as well: engine=bubblewrap."
    )


@asynccontextmanager
async def open_box(
    engine: str, request: BoxRequest, arguments: Sequence[str] = (), namespace: str | None = None
) -> AsyncIterator[Box]:
    """A box of this engine. `arguments` are further ones of a container's `run`, `namespace` is a pod's."""
    if request.composition is not None:
        opened = open_project(engine, request, request.composition)
    elif engine == "bubblewrap":
        opened = open_sandbox(request)
    elif engine == "kubernetes":
        opened = open_pod(request, namespace)
    else:
        opened = open_container(engine, request, arguments)
    async with opened as box:
        yield box
