"""What a task runs in. A box is open while an attempt needs it, and nothing of it is left afterwards."""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import re
import shlex
import shutil
import sys
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from agentlightning.environments.harbor.format import EnvironmentSection
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.files import remove_tree
from agentlightning.litagent import view
from agentlightning.litagent.bubblewrap import ENDPOINTS, INSIDE, Bubblewrap, Passage, bubblewrapped, check_bubblewrap
from agentlightning.litagent.process import MARK, Captured, Finished, Limits, run_command
from agentlightning.types.ids import random_hex

PLACES = ("/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", "/solution")
"""Folders that every box has besides its working directory."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENGINES = ("podman", "docker")
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_LONGEST_SECONDS = 86_400
"""After so long a container ends by itself: one that a killed run left behind does not stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxRequest:
    """Which box is to be opened."""

    section: EnvironmentSection
    build: Path
    """The folder with its Dockerfile."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of everything that runs in it."""
    endpoint: str | None = None
    """The base URL of the model that is to be reached from it."""
    uses: Sequence[str] = ()
    """Programs of this machine that are to be seen in it, where it shows this machine's."""


class Box(ABC):
    """A file system and what runs in it. Raises ExecutorError where the box fails, and nothing in it."""

    workdir: str

    @abstractmethod
    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | int | None = None,
        captured: Captured | None = None,
    ) -> Finished:
        """Run a command in the working directory to its end."""

    @abstractmethod
    async def put(self, folder: Path, place: str) -> None:
        """Copy what is in a folder of this machine to a place in the box."""

    @abstractmethod
    async def fetch(self, place: str, to: Path) -> bool:
        """Copy a file or folder out of the box; whether it is there."""

    async def shell(self, script: str, *, user: str | int | None = None, captured: Captured | None = None) -> Finished:
        """Run a line of shell."""
        return await self.run(["sh", "-c", script], user=user, captured=captured)

    async def read(self, place: str) -> bytes | None:
        """A small regular file; None if it is not there."""
        with tempfile.TemporaryDirectory(prefix="agl-harbor-") as name:
            to = Path(name) / "file"
            if not await self.fetch(place, to) or to.is_symlink() or not to.is_file():
                return None
            with to.open("rb") as file:
                return file.read(1_000_000)


def check_engine(name: str | None) -> str:
    """The engine that is taken. Raises ConfigError with what to install where there is none."""
    if name is not None and name not in (*_ENGINES, "bubblewrap"):
        raise ConfigError(f"engine is {name!r}; it can be 'podman', 'docker' or 'bubblewrap'.")
    if name == "bubblewrap":
        check_bubblewrap()
        return name
    for one in (name,) if name else _ENGINES:
        if shutil.which(one) is not None:
            return one
    raise ConfigError(
        f"There is no {name or 'podman or docker'} here, in which tasks run. On Debian: apt-get install podman. Tasks "
        "that need no more than this machine's programs run in a sandbox as well: engine=bubblewrap."
    )


@asynccontextmanager
async def open_box(engine: str, request: BoxRequest, arguments: Sequence[str] = ()) -> AsyncIterator[Box]:
    """A box of this engine. `arguments` are further ones of a container's `run`."""
    opened = _sandbox(request) if engine == "bubblewrap" else _container(engine, request, arguments)
    async with opened as box:
        yield box


# ---- containers ------------------------------------------------------------------------------------------------------

_building: dict[str, asyncio.Lock] = {}


@asynccontextmanager
async def _container(engine: str, request: BoxRequest, arguments: Sequence[str]) -> AsyncIterator[Box]:
    section = request.section
    image = section.docker_image or await _image(engine, request)
    name = f"agl-harbor-{random_hex(8)}"
    limits = [f"--cpus={section.cpus:g}"] if section.cpus else []
    limits += [f"--memory={section.memory_mb}m"] if section.memory_mb else []
    network = "none" if section.network == "no-network" else "host"
    stays = ["--entrypoint", "sh", image, "-c", f"trap exit TERM; sleep {_LONGEST_SECONDS} & wait"]
    run = ["run", "--detach", "--rm", "--name", name, "--network", network, *limits, *arguments, *stays]
    try:
        await _engine(engine, run, "start a container", seconds=section.build_timeout_sec)
        async with _passage(engine, name, request.endpoint if network == "none" else None):
            box = _ContainerBox(engine, name, request.environment)
            box.workdir = section.workdir or (await box.run(["pwd"])).stdout.strip() or "/"
            made = shlex.join([*PLACES, box.workdir])
            await box.shell(f"mkdir -p {made} && chmod 777 /logs /logs/*", user="0")
            yield box
    finally:
        await asyncio.shield(_removed(engine, name))


async def _removed(engine: str, name: str) -> None:
    now = ["--time", "0"] if engine == "podman" else []
    with suppress(ExecutorError):
        await _engine(engine, ["rm", "--force", *now, name], "remove a container", seconds=60.0)


async def _image(engine: str, request: BoxRequest) -> str:
    """The image of a Dockerfile, built once for what lies beside it."""
    if not (request.build / "Dockerfile").is_file():
        raise ConfigError(f"{request.build} has no Dockerfile, and task.toml no environment.docker_image.")
    tag = f"agl-harbor-{await asyncio.to_thread(_digest, request.build)}"
    async with _building.setdefault(tag, asyncio.Lock()):
        if (await _engine(engine, ["image", "inspect", tag], "look for an image", fails=True)).exit_code != 0:
            build = ["build", "--quiet", "--tag", tag, str(request.build)]
            await _engine(engine, build, f"build {request.build}", seconds=request.section.build_timeout_sec)
    return tag


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(f for f in folder.rglob("*") if f.is_file()):
        digest.update(f"{file.relative_to(folder)}\0{os.access(file, os.X_OK)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:24]


async def _engine(
    engine: str, arguments: Sequence[str], what: str, *, seconds: float = 60.0, fails: bool = False
) -> Finished:
    """A command of the engine. Raises ExecutorError with its last lines where it fails, unless that says something."""
    captured = Captured.empty()
    try:
        async with asyncio.timeout(seconds):
            finished = await run_command(
                [engine, *arguments], folder=Path("/"), environment=_client(), limits=_UNLIMITED, captured=captured
            )
    except TimeoutError:
        raise ExecutorError(f"{engine} took more than {seconds:g} s to {what}.") from None
    if finished.exit_code != 0 and not fails:
        raise ExecutorError(f"{engine} could not {what}: {_last(finished.stderr or finished.stdout)}")
    return finished


def _client() -> dict[str, str]:
    """What the engine's client sees of our environment."""
    known = ("PATH", "HOME", "USER", "XDG_RUNTIME_DIR", "XDG_DATA_HOME", "DOCKER_HOST", "DOCKER_CONFIG", "TMPDIR")
    return {name: os.environ[name] for name in known if name in os.environ}


@asynccontextmanager
async def _passage(engine: str, name: str, endpoint: str | None) -> AsyncIterator[None]:
    """The model's endpoint in a container that has no network, on its own loopback."""
    if endpoint is None:
        yield
        return
    found = await _engine(engine, ["inspect", "--format", "{{.State.Pid}}", name], "find a container")
    address = urlsplit(endpoint)
    assert address.hostname is not None
    port = str(address.port or 80)
    enter = ["nsenter", "--net", "--target", found.stdout.strip()]
    if os.geteuid() != 0:
        enter = ["podman", "unshare", *enter] if engine == "podman" else ["sudo", "--non-interactive", *enter]
    with tempfile.TemporaryDirectory(prefix="agl-gateway-") as folder:
        server = await asyncio.start_unix_server(Passage(address.hostname, int(port)), f"{folder}/gateway")
        relay = [sys.executable, "-I", "-S", str(INSIDE), "-", "/", f"{folder}/gateway", port]
        command = [*enter, *relay, "sh", "-c", "echo there; exec sleep infinity"]
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, start_new_session=True
        )
        try:
            assert process.stdout is not None
            if await process.stdout.readline() != b"there\n":
                said = (await process.communicate())[1].decode(errors="replace")
                raise ExecutorError(
                    f"The model cannot be reached from a container without a network here: {_last(said)}. Entering its "
                    "network needs root, or podman without root."
                )
            yield
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, 9)
            await asyncio.shield(process.wait())
            server.close()


class _ContainerBox(Box):
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
                call, folder=Path("/"), environment={**_client(), **hidden}, limits=Limits(), captured=captured
            )
        except BaseException:  # the client is gone, and what it had started is not
            await asyncio.shield(self._end(mark))
            raise

    async def _end(self, mark: str) -> None:
        """End what a command has started, which its client's end does not."""
        script = (
            "for place in /proc/[0-9]*; do tr '\\0' '\\n' < $place/environ 2>/dev/null | "
            f"grep -qx {MARK}={mark} && kill -9 ${{place#/proc/}}; done; true"
        )
        with suppress(ExecutorError):
            await _engine(self._engine, ["exec", "--user", "0", self._name, "sh", "-c", script], "end a command")

    async def put(self, folder: Path, place: str) -> None:
        await _engine(
            self._engine, ["exec", "--user", "0", self._name, "mkdir", "-p", place], "make a folder in a container"
        )
        await _engine(self._engine, ["cp", f"{folder}/.", f"{self._name}:{place}"], "copy files into a container")

    async def fetch(self, place: str, to: Path) -> bool:
        there = await _engine(
            self._engine, ["exec", "--user", "0", self._name, "test", "-e", place], "look", fails=True
        )
        if there.exit_code != 0:
            return False
        await _engine(self._engine, ["cp", f"{self._name}:{place}", str(to)], "copy files out of a container")
        return True


# ---- a sandbox of this machine ---------------------------------------------------------------------------------------


@asynccontextmanager
async def _sandbox(request: BoxRequest) -> AsyncIterator[Box]:
    """The programs of this machine, with folders of its own that can be written."""
    section = request.section
    if section.docker_image is not None and not (request.build / "Dockerfile").is_file():
        raise ConfigError(f"environment.docker_image: {section.docker_image} needs a container engine, not bubblewrap.")
    recipe = _read_recipe(request.build)
    folder = await asyncio.to_thread(_temporary_folder)
    try:
        workdir = _free(section.workdir or recipe.workdir)
        places = {place: folder / str(number) for number, place in enumerate((workdir, *PLACES))}
        for own in (folder / "work", *places.values()):
            own.mkdir()
        box = _SandboxBox(folder, places, {**recipe.environment, **request.environment}, request)
        box.workdir = workdir
        for source, place in recipe.copies:
            await box.copy_in(_below(request.build, source), place)
        yield box
    finally:
        await asyncio.shield(asyncio.to_thread(remove_tree, folder))


def _temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="agl-harbor-")).resolve()


class _SandboxBox(Box):
    """Files go in and out by programs in the sandbox: what a link leads to is then the sandbox's, and never ours."""

    workdir = "/"

    def __init__(
        self, folder: Path, places: Mapping[str, Path], environment: Mapping[str, str], request: BoxRequest
    ) -> None:
        self._folder, self._places, self._environment = folder, places, environment
        self._endpoint, self._uses = request.endpoint, request.uses

    async def run(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        user: str | int | None = None,
        captured: Captured | None = None,
    ) -> Finished:
        if user not in (None, 0, "0", "root"):
            raise ConfigError(f"In bubblewrap nobody is the user {user!r}: give a container engine for this task.")
        given = {**self._environment, **endpoint_inside(environment or {})}
        return await self._run(command, given, captured=captured)

    async def _run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        captured: Captured | None = None,
        stdin: bytes = b"",
        binds: Mapping[str, Path] | None = None,
    ) -> Finished:
        hidden, inside = exported(environment, command)
        known = {"PATH": os.environ.get("PATH", _PATH), **hidden}
        if self._endpoint is not None:  # never the task's: it is what is reached from the sandbox
            known["OPENAI_BASE_URL"] = self._endpoint
        seen = sorted(view.of_command([*self._uses])) if self._uses else []
        sandbox = Bubblewrap(binds={**self._places, **(binds or {})})
        there = ["sh", "-c", 'cd "$0" && exec "$@"', self.workdir, *inside]
        async with bubblewrapped(sandbox, there, self._folder / "work", known, seen) as wrapped:
            kept = {**wrapped.environment, "HOME": "/logs/agent"}
            return await run_command(
                wrapped.command, folder=Path("/"), environment=kept, limits=Limits(), captured=captured, stdin=stdin
            )

    async def put(self, folder: Path, place: str) -> None:
        await self._unpack(await asyncio.to_thread(_packed, folder), place)

    async def copy_in(self, source: Path, place: str) -> None:
        """Copy a file to a place, or into it where that ends in a slash; or what is in a folder."""
        if await asyncio.to_thread(source.is_dir):
            await self.put(source, place)
            return
        into, name = (place, source.name) if place.endswith("/") else place.rpartition("/")[::2]
        await self._unpack(await asyncio.to_thread(_packed, source, name), into or "/")

    async def _unpack(self, packed: bytes, place: str) -> None:
        script = 'mkdir -p "$0" && exec tar -xf - -C "$0" --no-same-owner'
        done = await self._run(["sh", "-c", script, place], {}, stdin=packed)
        if done.exit_code != 0:
            raise ExecutorError(f"Files cannot be put into {place} of a sandbox: {_last(done.stderr)}")

    async def fetch(self, place: str, to: Path) -> bool:
        out = self._folder / f"out-{random_hex(4)}"
        out.mkdir()
        try:
            done = await self._run(["cp", "-RP", "--", place, "/fetched/it"], {}, binds={"/fetched": out})
            found = out / "it"
            if done.exit_code != 0 or found.is_symlink() or not found.exists():
                return False
            await asyncio.to_thread(shutil.move, found, to)
            return True
        finally:
            await asyncio.to_thread(remove_tree, out)


_SYSTEM = {"bin", "boot", "dev", "etc", "lib", "lib64", "proc", "run", "sbin", "sys", "tmp", "usr", "fetched", ""}


def _free(workdir: str) -> str:
    """A working directory that hides nothing of the system. Raises ConfigError for another one."""
    path = PurePosixPath(workdir)
    if not path.is_absolute() or ".." in path.parts or path.parts[1:2] == () or path.parts[1] in _SYSTEM:
        raise ConfigError(f"In bubblewrap the working directory cannot be {workdir}: give a container engine.")
    return str(path)


def _below(build: Path, source: str) -> Path:
    """What COPY names. Raises ConfigError for what does not lie beside the Dockerfile."""
    found = (build / source).resolve()
    if not found.is_relative_to(build.resolve()):
        raise ConfigError(f"{build / 'Dockerfile'}: COPY {source}: that does not lie beside it.")
    return found


def _packed(source: Path, name: str = ".") -> bytes:
    """A file, or what is in a folder, as a tar archive in which links stay links."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        archive.add(source, arcname=name)
    return packed.getvalue()


@dataclass(frozen=True, slots=True)
class _Recipe:
    """What of a Dockerfile can be had on this machine."""

    workdir: str = "/app"
    copies: Sequence[tuple[str, str]] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def _read_recipe(build: Path) -> _Recipe:
    """WORKDIR, COPY and ENV of a Dockerfile. Raises ConfigError for what only a container engine does."""
    if not (file := build / "Dockerfile").is_file():
        return _Recipe()
    workdir, copies, environment = "/app", list[tuple[str, str]](), dict[str, str]()
    for instruction, rest in _instructions(file.read_text("utf-8", "replace")):
        words = shlex.split(rest)
        match instruction:
            case "FROM" | "LABEL" | "CMD" | "ENTRYPOINT" | "SHELL":
                pass
            case "WORKDIR":
                workdir = str(PurePosixPath(workdir) / rest.strip())
            case "COPY" if len(words) == 2 and not words[0].startswith("--"):
                copies.append((words[0], str(PurePosixPath(workdir) / words[1]) + "/" * words[1].endswith(("/", "."))))
            case "ENV":
                if not all("=" in word for word in words):  # the older form, of one variable
                    words = [f"{words[0]}={' '.join(words[1:])}"]
                environment |= {name: value for name, _, value in (word.partition("=") for word in words)}
            case _:
                raise ConfigError(f"{file}: {instruction} {rest[:60]}: that needs a container engine, not bubblewrap.")
    return _Recipe(workdir, copies, environment)


def _instructions(text: str) -> Iterator[tuple[str, str]]:
    lines = re.sub(r"\\\n", " ", "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#")))
    for line in filter(str.strip, lines.splitlines()):
        word, _, rest = line.strip().partition(" ")
        yield word.upper(), rest.strip()


def exported(variables: Mapping[str, str], command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables under names that mean nothing here, and the command that gives them theirs in the box.

    Their names are a task's: LD_PRELOAD or DOCKER_HOST would be for the program on this machine that opens the box.
    Raises ConfigError for what is no name.
    """
    for name in variables:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of an environment variable.")
    hidden = {f"AGL_VARIABLE_{number}": value for number, value in enumerate(variables.values())}
    if not hidden:
        return {}, [*command]
    sets = "; ".join(f'export {name}="${own}"; unset {own}' for name, own in zip(variables, hidden, strict=True))
    return hidden, ["sh", "-c", f'{sets}; exec "$@"', "sh", *command]


_UNLIMITED = Limits(file_bytes=None)


def endpoint_inside(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold the endpoint, as they are in a box without a network: its own loopback."""

    def local(url: str) -> str:
        parts = urlsplit(url)
        return parts._replace(netloc=f"127.0.0.1:{parts.port or 80}").geturl()

    return {name: local(value) if name in ENDPOINTS else value for name, value in environment.items()}


def _last(text: str) -> str:
    return text.strip()[-500:] or "it said nothing"
