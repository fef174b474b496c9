"""Containers of podman and docker, each a box."""

from __future__ import annotations

import asyncio
import hashlib
import os
import shlex
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from agentlightning.environments.harbor.archives import NO_FOLDER, PACK, excluded, not_packed, streamed, unpacked
from agentlightning.environments.harbor.boxes import PLACES, Box, BoxRequest, ending, exported, last_words
from agentlightning.environments.harbor.compose import ImageRecipe
from agentlightning.environments.harbor.egress import PORT, Egress, needs_proxy, proxy_variables, restricted
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.litagent.bubblewrap import INSIDE, Passage
from agentlightning.litagent.isolation import engine_environment
from agentlightning.litagent.process import MARK, Captured, Finished, Limits, run_command
from agentlightning.types.ids import random_hex

LONGEST_SECONDS = 86_400
"""After so long a container ends by itself: one that a killed run left behind does not stay."""
STAYS = f"trap exit TERM; sleep {LONGEST_SECONDS} & wait"
"""A line of shell that a container of a box runs meanwhile."""
UNLIMITED = Limits(file_bytes=None)
"""Of a command that writes files of the engine."""
_building: dict[str, asyncio.Lock] = {}


@asynccontextmanager
async def open_container(engine: str, request: BoxRequest, arguments: Sequence[str]) -> AsyncIterator[Box]:
    """A container of its own, with these further arguments of the engine's `run`."""
    section = request.section
    image = section.docker_image or await _image_of(engine, request)
    name = f"agl-harbor-{random_hex(8)}"
    limits = [f"--cpus={section.cpus:g}"] if section.cpus else []
    limits += [f"--memory={section.memory_mb}m"] if section.memory_mb else []
    network_policies = request.network_policies or (section.network_policy,)
    network = "none" if restricted(network_policies) else "host"
    egress = Egress(network_policies[0]) if needs_proxy(network_policies) else None
    stays = ["--entrypoint", "sh", image, "-c", STAYS]
    run = ["run", "--detach", "--rm", "--name", name, "--network", network, *limits, *arguments, *stays]
    try:
        await call_engine(engine, run, "start a container", seconds=section.build_timeout_sec)
        inside = request.endpoint if network == "none" else None
        port = PORT + (urlsplit(inside or "").port == PORT)
        if egress is not None:
            request = replace(request, environment={**proxy_variables(port), **request.environment})
        async with passage(engine, name, inside), _entrance(engine, name, egress, port):
            box = await prepared_box(engine, name, request, has_endpoint_inside=inside is not None)
            box.egress = egress
            yield box
    finally:
        await asyncio.shield(_removed(engine, name))


async def _removed(engine: str, name: str) -> None:
    now = ["--time", "0"] if engine == "podman" else []
    with suppress(ExecutorError):
        await call_engine(engine, ["rm", "--force", *now, name], "remove a container", seconds=60.0)


async def prepared_box(engine: str, name: str, request: BoxRequest, *, has_endpoint_inside: bool) -> Box:
    """A running container as a box, with its folders."""
    box = ContainerBox(engine, name, request.environment)
    box.workdir = request.section.workdir or (await box.run(["pwd"])).stdout.strip() or "/"
    box.has_endpoint_inside = has_endpoint_inside
    made = shlex.join([*PLACES, box.workdir])
    await box.shell(f"mkdir -p {made} && chmod 777 /logs /logs/*", user="0")
    return box


async def _image_of(engine: str, request: BoxRequest) -> str:
    """The image of a Dockerfile, built once for what lies beside it."""
    if not (request.build / "Dockerfile").is_file():
        raise ConfigError(f"{request.build} has no Dockerfile, and task.toml no environment.docker_image.")
    recipe = ImageRecipe(request.build, request.build / "Dockerfile")
    return await built_image(engine, recipe, request.section.build_timeout_sec)


async def built_image(engine: str, recipe: ImageRecipe, limit: float) -> str:
    """The image of a recipe, built once for the same files and the same that it is given."""
    given = [word for name, value in sorted(recipe.arguments.items()) for word in ("--build-arg", f"{name}={value}")]
    given += ["--target", recipe.target] if recipe.target else []
    if recipe.dockerfile != recipe.context / "Dockerfile":
        given += ["--file", str(recipe.dockerfile)]
    digest = await asyncio.to_thread(_digest, recipe.context)
    if given:
        text = recipe.dockerfile.read_bytes()
        digest = hashlib.sha256("\0".join([digest, *given]).encode() + text).hexdigest()[:24]
    tag = f"agl-harbor-{digest}"
    async with _building.setdefault(tag, asyncio.Lock()):
        if (await call_engine(engine, ["image", "inspect", tag], "look for an image", fails=True)).exit_code != 0:
            build = ["build", "--quiet", "--tag", tag, *given, str(recipe.context)]
            await call_engine(engine, build, f"build {recipe.context}", seconds=limit)
    return tag


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.rglob("*") if f.is_file() or f.is_symlink()):
        digest.update(f"{file.relative_to(folder)}\0{os.access(file, os.X_OK)}\0".encode() + content_digest(file))
    return digest.hexdigest()[:24]


def content_digest(file: Path) -> bytes:
    """The digest of a file's content, read piece by piece; of a link, which stays one, where it leads."""
    if file.is_symlink():
        return hashlib.sha256(os.fsencode(os.readlink(file))).digest()
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").digest()


async def call_engine(
    engine: str, arguments: Sequence[str], what: str, *, seconds: float = 60.0, fails: bool = False
) -> Finished:
    """A command of the engine. Raises ExecutorError with its last lines where it fails, unless that says something."""
    captured = Captured.empty()
    try:
        async with asyncio.timeout(seconds):
            finished = await run_command(
                [engine, *arguments],
                folder=Path("/"),
                environment=client_environment(),
                limits=UNLIMITED,
                captured=captured,
            )
    except TimeoutError:
        raise ExecutorError(f"{engine} took more than {seconds:g} s to {what}.") from None
    if finished.exit_code != 0 and not fails:
        raise ExecutorError(f"{engine} could not {what}: {last_words(finished.stderr or finished.stdout)}")
    return finished


def client_environment() -> dict[str, str]:
    """What the engine's client sees of our environment."""
    known = ("PATH", "HOME", "USER", "TMPDIR")
    return {**{name: os.environ[name] for name in known if name in os.environ}, **engine_environment()}


@asynccontextmanager
async def passage(engine: str, name: str, endpoint: str | None) -> AsyncIterator[None]:
    """The model's endpoint in a container that has no network, on its own loopback."""
    address = urlsplit(endpoint or "")
    port = address.port or 80
    async with _entrance(engine, name, Passage(address.hostname, port) if address.hostname else None, port):
        yield


@asynccontextmanager
async def _entrance(engine: str, name: str, leads: Passage | None, port: int) -> AsyncIterator[None]:
    """A port of a container's own loopback, whose connections lead out of it."""
    if leads is None:
        yield
        return
    found = await call_engine(engine, ["inspect", "--format", "{{.State.Pid}}", name], "find a container")
    enter = ["nsenter", "--net", "--target", found.stdout.strip()]
    if os.geteuid() != 0:
        enter = ["podman", "unshare", *enter] if engine == "podman" else ["sudo", "--non-interactive", *enter]
    with tempfile.TemporaryDirectory(prefix="agl-gateway-") as folder:
        server = await asyncio.start_unix_server(leads, f"{folder}/gateway")
        relay = [sys.executable, "-I", "-S", str(INSIDE), "-", "/", f"{folder}/gateway", str(port)]
        command = [*enter, *relay, "sh", "-c", "echo there; exec sleep infinity"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            assert process.stdout is not None
            if await process.stdout.readline() != b"there\n":
                complaint = (await process.communicate())[1].decode(errors="replace")
                raise ExecutorError(
                    "Nothing can be reached from a container with a network of its own here: "
                    f"{last_words(complaint)}. "
                    "Entering that network needs root, or podman without root."
                )
            yield
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            await asyncio.shield(process.wait())
            server.close()


class ContainerBox(Box):
    """A container that runs."""

    workdir = ""

    def __init__(self, engine: str, name: str, environment: Mapping[str, str]) -> None:
        self._engine, self._name, self._environment = engine, name, environment

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | int | None = None,
        captured: Captured | None = None,
    ) -> Finished:
        hidden, inside = exported({**self._environment, **(environment or {})}, command)
        names = [argument for name in hidden for argument in ("--env", name)]
        who = [] if user is None else ["--user", str(user)]
        where = ["--workdir", self.workdir] if self.workdir else []
        mark = f"agl-{random_hex(8)}"
        # What it leaves running holds no file open that we wait for, and is ended with the container.
        call = [self._engine, "exec", *where, *who, *names, "--env", f"{MARK}={mark}", self._name, *inside]
        try:
            return await run_command(
                call,
                folder=Path("/"),
                environment={**client_environment(), **hidden},
                limits=Limits(),
                captured=captured,
            )
        except BaseException:  # the client is gone, and what it had started is not
            await asyncio.shield(self._end(mark))
            raise

    async def _end(self, mark: str) -> None:
        """End what a command has started, which its client's end does not."""
        with suppress(ExecutorError):
            await call_engine(
                self._engine, ["exec", "--user", "0", self._name, "sh", "-c", ending(mark)], "end a command"
            )

    async def put(self, folder: Path, place: str) -> None:
        await call_engine(
            self._engine, ["exec", "--user", "0", self._name, "mkdir", "-p", place], "make a folder in a container"
        )
        await call_engine(self._engine, ["cp", f"{folder}/.", f"{self._name}:{place}"], "copy files into a container")

    async def stop(self) -> None:
        await call_engine(self._engine, ["stop", "--time", "0", self._name], "stop a container")

    async def fetch(self, place: str, to: Path, exclude: Sequence[str] = ()) -> bool:
        if exclude and await self._fetch_some(place, to, exclude):
            return True
        there = await call_engine(
            self._engine, ["exec", "--user", "0", self._name, "test", "-e", place], "look", fails=True
        )
        if there.exit_code != 0:
            return False
        await call_engine(self._engine, ["cp", f"{self._name}:{place}", str(to)], "copy files out of a container")
        return True

    async def _fetch_some(self, place: str, to: Path, exclude: Sequence[str]) -> bool:
        """Copy what is in a folder, but for what fits a pattern; False where the place is none."""
        where = ["--workdir", self.workdir] if self.workdir else []
        pack = ["sh", "-c", PACK, place, *excluded(exclude)]
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as name:
            archive = Path(name) / "archive"
            call = [self._engine, "exec", "--user", "0", *where, self._name, *pack]
            code, complaint = await streamed(call, client_environment(), archive)
            if code not in (0, NO_FOLDER):
                raise not_packed(place, complaint)
            return code == 0 and await asyncio.to_thread(unpacked, archive, Path(name) / "out", "", to)
