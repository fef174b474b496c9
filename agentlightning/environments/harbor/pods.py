"""Pods of a cluster as boxes, by the command `kubectl`: one for each attempt, of which nothing is left afterwards.

A pod runs an image that the cluster can pull: none is built here. What a command in it is given goes over its stdin, so
that keys stand in no command line and in no log of the API server. A pod ends by itself after a day, and before that
with this process, in whatever way that ends.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from agentlightning.environments.harbor.archives import NO_FOLDER, PACK, excluded, not_packed, streamed, unpacked
from agentlightning.environments.harbor.boxes import (
    PLACES,
    Box,
    BoxRequest,
    check_variables,
    ending,
    last_words,
    packed,
)
from agentlightning.environments.harbor.containers import LONGEST_SECONDS, STAYS
from agentlightning.environments.harbor.egress import NetworkPolicy
from agentlightning.environments.harbor.format import EnvironmentSection, HarborTask
from agentlightning.environments.harbor.removal import removed_afterwards
from agentlightning.errors import AgentError, ConfigError, ExecutorError
from agentlightning.litagent.process import MARK, Captured, Finished, Limits, run_command
from agentlightning.net.guard import is_local_name
from agentlightning.types.ids import random_hex

_CONTAINER = "main"
_ENDED = re.compile(r"command terminated with exit code \d+\s*\Z")
_STUCK = (
    *("ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"),
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError", "CrashLoopBackOff"),
)
_NAMESPACE = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_REMOVER = 'read -r said; exec kubectl "$@"'


def check_namespace(name: str | None) -> str | None:
    """Raises ConfigError for what is no name of a namespace."""
    if name is not None and not _NAMESPACE.fullmatch(name):
        raise ConfigError(f"kubernetes_namespace is {name!r}, which is no name of a namespace.")
    return name


def check_for_pods(task: HarborTask) -> None:
    """Raises ConfigError where a task needs what a pod does not have here."""
    file, where = task.file, task.folder / "task.toml"
    if task.compose is not None:
        raise ConfigError(f"{task.compose}: several containers need engine=podman or engine=docker, not kubernetes.")
    _check_section(file.environment, f"{where}: environment", task.folder / "environment")
    for stage in task.stages:
        verifier = stage.verifier
        for name, section in {"agent": stage.agent, "verifier": verifier}.items():
            _check_network(section.network_policy, f"{where}: {name}")
        users = [stage.agent.user, verifier.user, *(collect.user for collect in verifier.collect)]
        if other := [user for user in users if user not in (None, 0, "0", "root")]:
            raise ConfigError(f"{where}: user {other[0]}: a command in a pod has the image's user (engine=kubernetes).")
        if stage.apart and stage.apart.section.docker_image is None:
            raise ConfigError(
                f"{stage.apart.build / 'Dockerfile'}: engine=kubernetes builds no image. Push one and name it: "
                "verifier.environment.docker_image in task.toml."
            )
        if stage.apart:
            _check_network(stage.apart.section.network_policy, f"{where}: verifier.environment")


def _check_section(section: EnvironmentSection, where: str, build: Path) -> None:
    if section.docker_image is None:
        raise ConfigError(
            f"{where}.docker_image is missing: engine=kubernetes builds no image. Build {build}, push it to a registry "
            "that the cluster pulls from, and give its name there."
        )
    _check_network(section.network_policy, where)


def _check_network(policy: NetworkPolicy | None, where: str) -> None:
    if policy is not None and policy.mode != "public":
        raise ConfigError(
            f"{where}.network_mode is {policy.mode}, which engine=kubernetes does not see to. Say public, and keep "
            "pods with the label agentlightning.dev/harbor from the network by a NetworkPolicy."
        )


def check_kubectl() -> None:
    """Raises ConfigError where there is no kubectl."""
    if shutil.which("kubectl") is None:
        raise ConfigError(
            "engine=kubernetes needs kubectl, and there is none here. Install it: https://kubernetes.io/docs/tasks/tools."
        )


@asynccontextmanager
async def open_pod(request: BoxRequest, namespace: str | None) -> AsyncIterator[Box]:
    """A pod of the task's image."""
    if (host := urlsplit(request.endpoint or "").hostname) and (host == "0.0.0.0" or is_local_name(host)):
        raise ConfigError(
            f"The model's address is {request.endpoint}, which no pod reaches: in a pod that is the pod itself. Give "
            "one that pods reach: of a gateway in the cluster, or on an address of this machine (docs/kubernetes.md)."
        )
    name = f"agl-harbor-{random_hex(8)}"
    inside = ["--namespace", namespace] if namespace else []
    remove = ["delete", "pod", name, *inside, "--now", "--ignore-not-found", "--wait=false"]
    async with removed_afterwards(["sh", "-c", _REMOVER, "remover", *remove], _environment()):
        await _kubectl(["create", *inside, "-f", "-"], "make a pod", stdin=json.dumps(manifest(name, request.section)))
        await _running(name, inside, request.section.build_timeout_sec)
        box = PodBox(name, inside, request.environment)
        workdir = request.section.workdir or (await box.run(["pwd"])).stdout.strip() or "/"
        made = await box.shell(f"mkdir -p {shlex.join([*PLACES, workdir])} && chmod 777 /logs /logs/*")
        if made.exit_code != 0:
            raise ExecutorError(f"The folders of a task cannot be made in its pod: {last_words(made.stderr)}")
        box.workdir = workdir
        yield box


def manifest(name: str, section: EnvironmentSection) -> dict[str, Any]:
    """A pod that stays until it is deleted, for a day at most."""
    limits = {"cpu": f"{section.cpus:g}"} if section.cpus else {}
    limits |= {"memory": f"{section.memory_mb}Mi"} if section.memory_mb else {}
    limits |= {"ephemeral-storage": f"{section.storage_mb}Mi"} if section.storage_mb else {}
    container = {
        "name": _CONTAINER,
        "image": section.docker_image,
        "command": ["sh", "-c", STAYS],
        "resources": {"limits": limits, "requests": limits} if limits else {},
        "securityContext": {"privileged": False, "seccompProfile": {"type": "RuntimeDefault"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "labels": {"app.kubernetes.io/managed-by": "agentlightning", "agentlightning.dev/harbor": "attempt"},
        },
        "spec": {
            "restartPolicy": "Never",
            "activeDeadlineSeconds": LONGEST_SECONDS,
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "containers": [container],
        },
    }


def _environment() -> dict[str, str]:
    """What kubectl sees of our environment."""
    known = ("PATH", "HOME", "USER", "KUBECONFIG", "TMPDIR", "KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT")
    return {name: os.environ[name] for name in known if name in os.environ}


async def _kubectl(arguments: Sequence[str], what: str, *, stdin: str = "", seconds: float = 60.0) -> Finished:
    try:
        async with asyncio.timeout(seconds):
            done = await run_command(
                ["kubectl", *arguments],
                folder=Path("/"),
                environment=_environment(),
                limits=Limits(),
                stdin=stdin.encode(),
            )
    except TimeoutError:
        raise ExecutorError(f"kubectl took more than {seconds:g} s to {what}.") from None
    if done.exit_code != 0:
        raise ExecutorError(f"kubectl could not {what}: {last_words(done.stderr or done.stdout)}")
    return done


async def _running(name: str, inside: Sequence[str], limit: float) -> None:
    """Wait until a pod runs. Raises ExecutorError where it cannot, with the cluster's reason."""
    deadline = time.monotonic() + limit
    while True:
        found = await _kubectl(["get", "pod", name, *inside, "--output", "json"], "look at a pod")
        status = json.loads(found.stdout).get("status", {})
        containers = status.get("containerStatuses", [])
        if status.get("phase") == "Running" and containers and all(one.get("ready") for one in containers):
            return
        waiting = [one.get("state", {}).get("waiting", {}) for one in containers]
        stuck = [one for one in waiting if one.get("reason") in _STUCK]
        late = time.monotonic() > deadline
        if stuck or late or status.get("phase") in ("Failed", "Succeeded"):
            about = [*stuck, *waiting, *status.get("conditions", []), status]
            why = "; ".join(f"{one.get('reason')}: {one.get('message', '')}" for one in about if one.get("reason"))
            when = f" after {limit:g} s (environment.build_timeout_sec)" if late else ""
            raise ExecutorError(f"The pod {name} does not run{when}: {why[:500] or status.get('phase')}")
        await asyncio.sleep(1.0)


class PodBox(Box):
    """A pod that runs."""

    workdir = ""

    def __init__(self, name: str, inside: Sequence[str], environment: Mapping[str, str]) -> None:
        self._name, self._inside, self._environment = name, inside, environment

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | int | None = None,
        captured: Captured | None = None,
    ) -> Finished:
        if user not in (None, 0, "0", "root"):
            raise ConfigError(f"A command in a pod has the image's user, and not {user}: give podman or docker.")
        variables = check_variables({**self._environment, **(environment or {})})
        mark = f"agl-{random_hex(8)}"
        lines = [f"export {name}={shlex.quote(value)}" for name, value in {**variables, MARK: mark}.items()]
        lines += [f"cd {shlex.quote(self.workdir)} || exit 126"] if self.workdir else []
        script = "\n".join([*lines, f"exec {shlex.join(command)} < /dev/null", ""])
        try:
            done = await self._exec(["sh"], script.encode(), captured)
        except BaseException:  # kubectl is gone, and what it had started is not
            await asyncio.shield(self._end(mark))
            raise
        return done

    async def _exec(self, command: Sequence[str], stdin: bytes, captured: Captured | None = None) -> Finished:
        """Run a command in the pod. Raises ExecutorError where that was not possible."""
        done = await run_command(
            self._command(command, stdin=True),
            folder=Path("/"),
            environment=_environment(),
            limits=Limits(),
            stdin=stdin,
            captured=captured,
        )
        if done.exit_code != 0 and not _ENDED.search(done.stderr):
            raise ExecutorError(f"kubectl could not run a command in a pod: {last_words(done.stderr)}")
        return done

    def _command(self, command: Sequence[str], *, stdin: bool) -> list[str]:
        reads = ["--stdin"] if stdin else []
        return ["kubectl", "exec", *reads, self._name, *self._inside, "--container", _CONTAINER, "--", *command]

    async def _end(self, mark: str) -> None:
        """End what a command has started, which its client's end does not."""
        with suppress(ExecutorError, AgentError, TimeoutError):
            async with asyncio.timeout(30.0):
                await self._exec(["sh"], ending(mark).encode())

    async def put(self, folder: Path, place: str) -> None:
        script = 'mkdir -p "$0" && exec tar -xof - -C "$0"'
        done = await self._exec(["sh", "-c", script, place], await asyncio.to_thread(packed, folder))
        if done.exit_code != 0:
            raise ExecutorError(f"Files cannot be put into {place} of a pod: {last_words(done.stderr)}")

    async def fetch(self, place: str, to: Path, exclude: Sequence[str] = ()) -> bool:
        if exclude and await self._fetch_some(place, to, exclude):
            return True
        path = PurePosixPath(place)
        script = 'cd "$0" 2>/dev/null && { [ -e "$1" ] || [ -L "$1" ]; } || exit 3; exec tar -cf - -- "$1"'
        where = str(path.parent) if path.is_absolute() else str(PurePosixPath(self.workdir) / path.parent)
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as name:
            archive = Path(name) / "archive"
            command = self._command(["sh", "-c", script, where, path.name], stdin=False)
            code, complaint = await streamed(command, _environment(), archive)
            if code == 3:
                return False
            if code != 0:
                raise ExecutorError(f"{place} cannot be copied out of a pod: {last_words(complaint)}")
            return await asyncio.to_thread(unpacked, archive, Path(name) / "out", path.name, to)

    async def _fetch_some(self, place: str, to: Path, exclude: Sequence[str]) -> bool:
        """Copy what is in a folder, but for what fits a pattern; False where the place is none."""
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as name:
            archive = Path(name) / "archive"
            pack = ["sh", "-c", PACK, str(PurePosixPath(self.workdir) / place), *excluded(exclude)]
            code, complaint = await streamed(self._command(pack, stdin=False), _environment(), archive)
            if code not in (0, NO_FOLDER):
                raise not_packed(place, complaint)
            return code == 0 and await asyncio.to_thread(unpacked, archive, Path(name) / "out", "", to)
