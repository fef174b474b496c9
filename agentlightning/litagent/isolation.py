"""Keeping a program apart from the machine: bubblewrap, a container command of the user's, or a Job of a cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from agentlightning.arguments import explained_class
from agentlightning.errors import ConfigError
from agentlightning.litagent.bubblewrap import Bubblewrap, Wrapped, bubblewrapped, check_bubblewrap
from agentlightning.litagent.kubernetes import Kubernetes, server_of
from agentlightning.litagent.users import change_owner, own_user


@explained_class
@dataclass(frozen=True, slots=True)
class Container:
    """A command that runs the program in a container, for example

        Container(["docker", "run", "--rm", "-i", "--name", "{name}", "--network", "agents", "-v",
                   "{workspace}:{workspace}", "-w", "{workspace}", "{env}", "my-image"],
                  cleanup=["docker", "rm", "-f", "{name}"])

    `{workspace}` is the working directory, `{name}` a name made for this attempt, and an argument `{env}` becomes
    `--env NAME` for each of the program's variables. An argument `{user}` becomes `--user ID:ID`
    of a user that no other attempt is where we are root, and nothing otherwise. The network is the command's business.
    """

    command: Sequence[str]
    """The command line in front of the program's own."""
    cleanup: Sequence[str] | None = None
    """Run after the attempt, however it ended: a container outlives its client's death."""

    def wrap(
        self, command: Sequence[str], workspace: Path, environment: Mapping[str, str], user: int | None = None
    ) -> list[str]:
        """The whole command line."""
        whole = {"{env}": [argument for name in sorted(environment) for argument in ("--env", name)]}
        whole["{user}"] = [] if user is None else ["--user", f"{user}:{user}"]
        given = [whole[a] if a in whole else [_fill(a, workspace)] for a in self.command]
        return [*(a for arguments in given for a in arguments), *command]

    async def clean(self, workspace: Path) -> None:
        """Run `cleanup`, for at most 30 s."""
        if self.cleanup:
            arguments = [_fill(a, workspace) for a in self.cleanup]
            nothing = asyncio.subprocess.DEVNULL
            process = await asyncio.create_subprocess_exec(*arguments, stdout=nothing, stderr=nothing)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), 30)


INHERITED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LANGUAGE", "TZ", "TMPDIR", "TERM"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "LD_LIBRARY_PATH", "NODE_PATH", "PYTHONPATH", "PYTHONHOME"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS"),
    }
)
"""What a program sees of our environment, with LC_*; the rest may hold secrets. `env` adds to it."""
ENGINE_VARIABLES = (
    *("DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "DOCKER_TLS_VERIFY", "DOCKER_API_VERSION"),
    *("CONTAINER_HOST", "CONTAINER_CONNECTION", "CONTAINER_SSHKEY", "CONTAINERS_CONF", "REGISTRY_AUTH_FILE"),
    *("XDG_RUNTIME_DIR", "XDG_DATA_HOME", "XDG_CONFIG_HOME"),
)
"""By which clients of docker and podman find their engine, and what belongs to it."""


def base_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k in INHERITED or k.startswith("LC_")}


def engine_environment() -> dict[str, str]:
    """What the client of a container engine sees of our environment, and no program in a container."""
    return {name: os.environ[name] for name in ENGINE_VARIABLES if name in os.environ}


Isolation = Literal["bubblewrap"] | Bubblewrap | Container | Kubernetes | None


@asynccontextmanager
async def isolated(
    isolation: Literal["bubblewrap"] | Bubblewrap | Container | None,
    command: Sequence[str],
    workspace: Path,
    environment: Mapping[str, str],
    readable: Sequence[Path] = (),
    left: Path | None = None,
) -> AsyncIterator[Wrapped]:
    """The command to run on this machine instead.

    In bubblewrap it sees the folders of `readable` too, and what a program that has ended has `left`, read-only.
    """
    if isolation is None:
        yield Wrapped(command, environment)
    elif isinstance(isolation, Container):
        with own_user() if "{user}" in isolation.command else nullcontext() as user:
            await asyncio.to_thread(change_owner, user, workspace)
            try:
                whole = isolation.wrap(command, workspace, environment, user)
                yield Wrapped(whole, {**base_environment(), **engine_environment(), **environment})
            finally:
                await asyncio.shield(isolation.clean(workspace))
    else:
        sandbox = Bubblewrap() if isolation == "bubblewrap" else isolation
        async with bubblewrapped(sandbox, command, workspace, environment, readable, left) as wrapped:
            yield wrapped


def check_isolation(isolation: object, options: Mapping[str, object] | None = None) -> None:
    """Raises ConfigError for what cannot work here, would not isolate, or makes one of the program's `options` have no
    effect."""
    if isolation == "bubblewrap" or isinstance(isolation, Bubblewrap):
        check_bubblewrap()
    elif isinstance(isolation, Kubernetes):
        server_of(isolation)
        if given := [name for name, value in (options or {}).items() if value is not None]:
            raise ConfigError(f"In a Job {given[0]} has no effect: {_INSTEAD[given[0]]}.")
    elif isolation is not None and not isinstance(isolation, Container):
        raise ConfigError(
            f"isolation is {isolation!r}; it can be 'bubblewrap', a Bubblewrap, a Container, a Kubernetes or None."
        )


_INSTEAD = {
    "files": "the image holds the program's files",
    "workspaces": "the working directory is the pod's, and goes with it",
    "limits": "the pod has limits of its own, Kubernetes(cpu=…, memory=…, storage=…)",
}


def _fill(argument: str, workspace: Path) -> str:
    return argument.replace("{workspace}", str(workspace)).replace("{name}", f"agl-{workspace.name}")
