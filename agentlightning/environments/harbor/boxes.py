"""What a task runs in. A box is open while an attempt needs it, and nothing of it is left afterwards."""

from __future__ import annotations

import asyncio
import io
import os
import re
import shlex
import shutil
import tarfile
import tempfile
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from urllib.parse import urlsplit

from agentlightning.environments.harbor.archives import excluded
from agentlightning.environments.harbor.compose import Composition
from agentlightning.environments.harbor.egress import Egress, NetworkPolicy
from agentlightning.environments.harbor.format import EnvironmentSection
from agentlightning.errors import ConfigError, ExecutorError
from agentlightning.files import reason_of_file, remove_tree
from agentlightning.litagent import view
from agentlightning.litagent.bubblewrap import ENDPOINTS, Bubblewrap, bubblewrapped
from agentlightning.litagent.process import MARK, Captured, Finished, Limits, run_command
from agentlightning.reading import read_text
from agentlightning.types.ids import random_hex

MOST_PACKED = 1 << 30
"""Of what is copied into a box, which is kept in memory on its way."""

PLACES = ("/logs/agent", "/logs/verifier", "/logs/artifacts", "/tests", "/solution")
"""Folders that every box has besides its working directory."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


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
    composition: Composition | None = None
    """The services among which it is main, where there are several."""
    network_policies: Sequence[NetworkPolicy] = ()
    """What is reached in each phase, that of its beginning first; what its section says, if nothing is given."""


class Box(ABC):
    """A file system and what runs in it. Raises ExecutorError where the box fails, and nothing in it."""

    workdir: str
    services: Mapping[str, Box] = MappingProxyType({})
    """The other services of a task of several containers, by name."""
    has_endpoint_inside: bool = False
    """Whether the model is reached at its own loopback, so that its variables have to say so."""
    egress: Egress | None = None
    """What it reaches besides its model goes through this, where phases restrict that."""

    @contextmanager
    def reaching(self, policy: NetworkPolicy | None) -> Iterator[None]:
        """Keep to what may be reached in a phase that says so."""
        if self.egress is None or policy is None:
            yield
            return
        with self.egress.during(policy):
            yield

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
    async def fetch(self, place: str, to: Path, exclude: Sequence[str] = ()) -> bool:
        """Copy a file or folder out of the box; whether it is there. Of a folder, what fits a pattern is left out."""

    async def stop(self) -> None:
        """End all that runs in a box that has other services, from which files are still to be fetched."""
        raise ExecutorError("A box without other services is closed, and not stopped.")

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


@asynccontextmanager
async def open_sandbox(request: BoxRequest) -> AsyncIterator[Box]:
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
        await self._unpack(await asyncio.to_thread(packed, folder), place)

    async def copy_in(self, source: Path, place: str) -> None:
        """Copy a file to a place, or into it where that ends in a slash; or what is in a folder."""
        if await asyncio.to_thread(source.is_dir):
            await self.put(source, place)
            return
        into, name = (place, source.name) if place.endswith("/") else place.rpartition("/")[::2]
        await self._unpack(await asyncio.to_thread(packed, source, name), into or "/")

    async def _unpack(self, archive: bytes, place: str) -> None:
        script = 'mkdir -p "$0" && exec tar -xf - -C "$0" --no-same-owner'
        done = await self._run(["sh", "-c", script, place], {}, stdin=archive)
        if done.exit_code != 0:
            raise ExecutorError(f"Files cannot be put into {place} of a sandbox: {last_words(done.stderr)}")

    async def fetch(self, place: str, to: Path, exclude: Sequence[str] = ()) -> bool:
        out = self._folder / f"out-{random_hex(4)}"
        out.mkdir()
        try:
            copy = ["cp", "-RP", "--", place, "/fetched/it"]
            if exclude:
                copy = ["sh", "-c", _COPY, place, *excluded(exclude)]
            done = await self._run(copy, {}, binds={"/fetched": out})
            found = out / "it"
            if done.exit_code != 0 or found.is_symlink() or not found.exists():
                return False
            await asyncio.to_thread(shutil.move, found, to)
            return True
        finally:
            await asyncio.to_thread(remove_tree, out)


_COPY = (
    '[ -d "$0" ] || exec cp -RP -- "$0" /fetched/it; mkdir /fetched/it && tar -cf /fetched/archive "$@" -C "$0" . && '
    "exec tar -xf /fetched/archive -C /fetched/it"
)
"""A line of shell that copies a file, or a folder without what fits the patterns."""
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


def packed(source: Path, name: str = ".") -> bytes:
    """A file, or what is in a folder, as a tar archive in which links stay links. Raises ExecutorError for more than
    `MOST_PACKED` bytes, as files with holes seem to have, and for folders nested without end."""
    packed, size = io.BytesIO(), 0

    def counted(member: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal size
        size += member.size + tarfile.RECORDSIZE // 10
        if size > MOST_PACKED:
            raise ExecutorError(
                f"{member.name}: more than {MOST_PACKED >> 20:,} MiB are not copied into a box at once."
            )
        return member

    try:
        with tarfile.open(fileobj=packed, mode="w") as archive:
            archive.add(source, arcname=name, filter=counted)
    except RecursionError:
        raise ExecutorError("What is nested as deep as this is not copied into a box.") from None
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
    try:
        found = [(word, rest, shlex.split(rest)) for word, rest in _instructions(read_text(file))]
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {reason_of_file(error)}.") from None
    for instruction, rest, words in found:
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


def check_variables(variables: Mapping[str, str]) -> Mapping[str, str]:
    """Raises ConfigError for what is no name of a variable."""
    for name in variables:
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of an environment variable.")
    return variables


def exported(variables: Mapping[str, str], command: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The variables under names that mean nothing here, and the command that gives them theirs in the box.

    Their names are a task's: LD_PRELOAD or DOCKER_HOST would be for the program on this machine that opens the box.
    Raises ConfigError for what is no name.
    """
    check_variables(variables)
    hidden = {f"AGL_VARIABLE_{number}": value for number, value in enumerate(variables.values())}
    if not hidden:
        return {}, [*command]
    sets = "; ".join(f'export {name}="${own}"; unset {own}' for name, own in zip(variables, hidden, strict=True))
    return hidden, ["sh", "-c", f'{sets}; exec "$@"', "sh", *command]


def endpoint_inside(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that hold the endpoint, as they are in a box without a network: its own loopback."""

    def local(url: str) -> str:
        parts = urlsplit(url)
        return parts._replace(netloc=f"127.0.0.1:{parts.port or 80}").geturl()

    return {name: local(value) if name in ENDPOINTS else value for name, value in environment.items()}


def ending(mark: str) -> str:
    """The line of shell that ends every process whose environment has this mark."""
    return (
        "for place in /proc/[0-9]*; do tr '\\0' '\\n' < $place/environ 2>/dev/null | "
        f"grep -qx {MARK}={mark} && kill -9 ${{place#/proc/}}; done; true"
    )


def last_words(text: str) -> str:
    """The end of what a program said."""
    return text.strip()[-500:] or "it said nothing"
