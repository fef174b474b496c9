"""A task of several containers: a project of the engine's compose for each attempt. Nothing of it is left afterwards.

Compose is given a file that is written here: images that are built, and names that no other attempt has. In which order
services start and whether they are healthy is seen to here, because podman's compose does not. Another process removes
the project when this one says so, or ends in whatever way.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from agentlightning.environments.harbor.boxes import Box, BoxRequest, last_words
from agentlightning.environments.harbor.compose import MAIN, Composition, Mounted, Service, ServiceCheck, in_waves
from agentlightning.environments.harbor.containers import (
    STAYS,
    ContainerBox,
    built_image,
    call_engine,
    client_environment,
    passage,
    prepared_box,
)
from agentlightning.environments.harbor.removal import removed_afterwards
from agentlightning.errors import AgentError, ConfigError, ExecutorError
from agentlightning.files import remove_tree
from agentlightning.net.guard import is_local_name
from agentlightning.types.ids import random_hex

_REMOVER = """\
engine=$1 project=$2 folder=$3 now= rounds=1
[ "$engine" = podman ] && now="--time 0"
read -r said
case $engine-$said in *-end | podman-failed) ;; docker-failed) rounds=2 ;; *) rounds=4 ;; esac
all() { "$engine" ps -aq --filter "name=$project-"; }
while [ $rounds -gt 0 ]; do
  rounds=$((rounds - 1))
  found=$(all); [ -n "$found" ] && "$engine" rm -f -v $now $found
  [ "$engine" = podman ] && podman pod rm -f "pod_$project"
  found=$("$engine" network ls -q --filter "name=${project}_"); [ -n "$found" ] && "$engine" network rm $found
  found=$("$engine" volume ls -q --filter "name=${project}_"); [ -n "$found" ] && "$engine" volume rm -f $found
  [ $rounds -gt 0 ] && sleep 5
done
rm -rf -- "$folder"
# Without root, some files are of users that only podman has.
[ "$engine" = podman ] && [ -e "$folder" ] && podman unshare rm -rf -- "$folder"
[ -z "$(all)" ]
"""
"""Removes a project and its folder when it reads a line, or when nobody is left who would write one. Then compose may
still be starting something, and so may Docker's server after a failure."""


@cache
def find_compose(engine: str) -> tuple[str, ...]:
    """The engine's compose, as a command. Raises ConfigError with what to install where there is none."""
    plugin = (engine, "compose")
    own = ("podman-compose",) if engine == "podman" else ("docker-compose",)
    for command in (own, plugin) if engine == "podman" else (plugin, own):
        with suppress(OSError, subprocess.TimeoutExpired):
            tried = subprocess.run(
                [*command, "version"], capture_output=True, env=client_environment(), timeout=60, check=False
            )
            if tried.returncode == 0:
                return command
    what = "podman-compose" if engine == "podman" else "docker-compose (or Docker's plugin, docker-compose-plugin)"
    raise ConfigError(
        f"A task with docker-compose.yaml needs {engine}'s compose, and there is none here. On Debian: apt-get install "
        f"{what}."
    )


@asynccontextmanager
async def open_project(engine: str, request: BoxRequest, composition: Composition) -> AsyncIterator[Box]:
    """The services of a task, and main among them as the box."""
    compose = await asyncio.to_thread(find_compose, engine)
    limit = request.section.build_timeout_sec
    await asyncio.to_thread(_check_further_names, compose, composition)
    images = {service.name: await _image(engine, service, limit) for service in composition.services.values()}
    project = f"agl-services-{random_hex(8)}"
    folder = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="agl-harbor-"))
    try:
        remove = ["sh", "-c", _REMOVER, "remover", engine, project, str(folder)]
        async with removed_afterwards(remove, client_environment()):
            written = await asyncio.to_thread(_written, composition, images, project, folder)
            file = folder / "compose.json"
            file.write_text(json.dumps(_escaped(written)))
            command = [*compose, "--project-name", project, "--file", str(file)]
            await _start(engine, command, composition, project, limit)
            inside = request.endpoint if _is_of_this_machine(request.endpoint) else None
            async with passage(engine, f"{project}-{MAIN}", inside):
                box = await prepared_box(engine, f"{project}-{MAIN}", request, has_endpoint_inside=inside is not None)
                others = [name for name in composition.services if name != MAIN]
                box.services = {name: ContainerBox(engine, f"{project}-{name}", {}) for name in others}
                yield box
    finally:
        await asyncio.shield(asyncio.to_thread(remove_tree, folder))


def _check_further_names(compose: Sequence[str], composition: Composition) -> None:
    """Raises ConfigError where services have aliases and podman-compose is too old to give them."""
    if not any(aliases for service in composition.services.values() for aliases in service.networks.values()):
        return
    tried = subprocess.run(
        [*compose, "version"], capture_output=True, text=True, env=client_environment(), timeout=60, check=False
    )
    if found := re.search(r"podman-composer? version:? +(1\.0\.\d+)", tried.stdout + tried.stderr):
        raise ConfigError(
            f"Services have further names (container_name, aliases), which podman-compose {found[1]} does not give. A "
            "newer one does: pip install podman-compose."
        )


def _is_of_this_machine(endpoint: str | None) -> bool:
    """Whether an address means another machine in a container, which has a loopback of its own."""
    host = urlsplit(endpoint or "").hostname
    return host is not None and (host == "0.0.0.0" or is_local_name(host))


async def _image(engine: str, service: Service, limit: float) -> str:
    if isinstance(service.image, str):
        return service.image
    return await built_image(engine, service.image, limit)


# ---- the file --------------------------------------------------------------------------------------------------------


def _written(composition: Composition, images: Mapping[str, str], project: str, folder: Path) -> dict[str, Any]:
    """The project's file. Files of the task are copied to the folder: an attempt may write to its own alone."""
    services: dict[str, Any] = {}
    volumes: set[str] = set()
    copies: dict[Path, Path] = {}
    for name, service in composition.services.items():
        mounts = [_mount(mount, folder, copies) for mount in service.mounts]
        volumes |= {mount.source for mount in service.mounts if isinstance(mount.source, str)}
        services[name] = {
            **({"command": ["sh", "-c", STAYS]} if name == MAIN else {}),
            **service.settings,
            "image": images[name],
            "container_name": f"{project}-{name}",
            "environment": [f"{key}={value}" for key, value in service.environment.items()],
            "networks": _networks(service),
            "volumes": mounts,
        }
    networks = {f"{name}-net": {"internal": True} if inside else {} for name, inside in composition.networks.items()}
    return {"services": services, "networks": networks, "volumes": {name: {} for name in sorted(volumes)}}


def _networks(service: Service) -> Any:
    """A service's networks; as a list where that says it, which older versions of podman-compose take alone."""
    if not any(service.networks.values()):
        return [f"{name}-net" for name in service.networks]
    return {f"{name}-net": {"aliases": [*aliases]} if aliases else {} for name, aliases in service.networks.items()}


def _mount(mount: Mounted, folder: Path, copies: dict[Path, Path]) -> str:
    source = mount.source
    if isinstance(source, Path):
        if source not in copies:
            copy = copies[source] = folder / str(len(copies))
            try:
                if source.is_dir():
                    shutil.copytree(source, copy, symlinks=True)
                else:
                    shutil.copy2(source, copy)
            except OSError as error:  # shutil.Error is one
                raise ConfigError(f"{source} cannot be copied for an attempt: {str(error)[:300]}.") from None
        source = copies[source]
    return f"{source}:{mount.target}:{'ro' if mount.read_only else 'rw'}"


def _escaped(value: Any) -> Any:
    """A value in which compose finds no variables."""
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_escaped(one) for one in value]
    return value.replace("$", "$$") if isinstance(value, str) else value


# ---- its start and its end -------------------------------------------------------------------------------------------


async def _start(engine: str, command: Sequence[str], composition: Composition, project: str, limit: float) -> None:
    """Start all services, each after those it depends on, and wait until those with a healthcheck are healthy."""
    services = composition.services
    try:
        async with asyncio.timeout(limit):
            for number, wave in enumerate(in_waves(services)):
                await asyncio.gather(
                    *(
                        _ready(engine, project, services[name], condition)
                        for name, condition in {pair for service in wave for pair in service.after.items()}
                    )
                )
                await _up(engine, command, project, [service.name for service in wave])
                if number == 0 and len(services) > 1:
                    await _check_names(engine, project, composition)
            for service in services.values():
                await _ready(engine, project, service, "service_healthy" if service.check else "service_started")
    except TimeoutError:
        raise ExecutorError(
            f"The services of docker-compose.yaml were not ready after {limit:g} s (environment.build_timeout_sec)."
        ) from None


async def _up(engine: str, command: Sequence[str], project: str, names: Sequence[str]) -> None:
    code, output = await _composed([*command, "up", "--detach", "--no-deps", *names])
    for name in names:  # podman-compose ends with 0 where a container could not be started
        state = await _state(engine, f"{project}-{name}")
        if code != 0 or state is None or state[0] == "created":
            raise ExecutorError(f"{command[0]} could not start the service {name}: {last_words(output)}")


async def _composed(command: Sequence[str]) -> tuple[int, str]:
    """Run compose to its end. What it leaves running stays: podman's server of names is among it."""
    with tempfile.TemporaryFile() as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=client_environment(),
            start_new_session=True,
        )
        try:
            code = await process.wait()
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await asyncio.shield(process.wait())
            raise
        output.seek(max(0, output.tell() - 10_000))
        return code, output.read().decode(errors="replace")


async def _state(engine: str, container: str) -> tuple[str, int] | None:
    """Whether a container runs, and its exit code; None where it does not exist."""
    shown = ["inspect", "--type", "container", "--format", "{{.State.Status}} {{.State.ExitCode}}", container]
    found = await call_engine(engine, shown, "look at a container", fails=True)
    if found.exit_code != 0:
        return None
    status, code = found.stdout.split()
    return status, int(code)


async def _ready(engine: str, project: str, service: Service, condition: str) -> None:
    """Wait until a service is what a condition says. Raises ExecutorError where it cannot become so."""
    container = f"{project}-{service.name}"
    began, wait = time.monotonic(), 0.2
    check = service.check
    deadline = began + (check.start + check.retries * check.interval + check.timeout if check else 0.0)
    while True:
        status, code = await _state(engine, container) or ("removed", 1)
        ended = status in ("exited", "stopped", "removed")
        if (ended and code != 0) or (ended and condition == "service_healthy") or (ended and service.name == MAIN):
            raise ExecutorError(
                f"The service {service.name} ended with exit code {code}: {await _logs(engine, container)}"
            )
        if condition == "service_started" or (condition == "service_completed_successfully" and ended):
            return
        if condition == "service_healthy" and check is not None:
            if await _passes(ContainerBox(engine, container, {}), check):
                return
            if time.monotonic() > deadline:
                raise ExecutorError(
                    f"The service {service.name} did not become healthy: {await _logs(engine, container)}"
                )
        await asyncio.sleep(wait)
        wait = min(wait * 1.5, 5.0, max(check.interval, 0.2) if check else 5.0)


async def _passes(box: ContainerBox, check: ServiceCheck) -> bool:
    try:
        async with asyncio.timeout(check.timeout):
            return (await box.run(check.command)).exit_code == 0
    except (TimeoutError, AgentError):
        return False


async def _logs(engine: str, container: str) -> str:
    with suppress(ExecutorError, AgentError):
        found = await call_engine(engine, ["logs", "--tail", "20", container], "read what it said", fails=True)
        return last_words(found.stderr + found.stdout)
    return last_words("")


async def _check_names(engine: str, project: str, composition: Composition) -> None:
    """Raises ExecutorError where podman's networks give no names to services."""
    if engine != "podman":
        return
    for name in composition.networks:
        shown = ["network", "inspect", "--format", "{{.DNSEnabled}}", f"{project}_{name}-net"]
        found = await call_engine(engine, shown, "look at a network", fails=True)
        if found.exit_code == 0 and found.stdout.strip() == "false":
            raise ExecutorError(
                "podman's networks give services no names here, by which they find each other. On Debian: apt-get "
                "install golang-github-containernetworking-plugin-dnsname, or aardvark-dns where podman has netavark"
                + (f"; and say nothing of internal for the network {name}." if composition.networks[name] else ".")
            )
