"""A task's folder in Harbor's format (schema 1.4 and older): task.toml, instruction, environment, tests, solution.

Each key of task.toml is honoured, or refused by its name with the reason. Keys that the format does not have are
refused too: a misspelt limit would be none.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from agentlightning.environments.harbor.egress import Network, NetworkPolicy, checked_host
from agentlightning.errors import ConfigError
from agentlightning.files import meant_by, reason_of_file
from agentlightning.reading import parsed_toml, read_text

TASK_FILE, INSTRUCTION_FILE, COMPOSE_FILE = "task.toml", "instruction.md", "docker-compose.yaml"
_BYTES = 2**24
"""Of task.toml and of an instruction."""
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_SERVICE = r"^[a-zA-Z0-9][\w.-]*$"
IMAGE_NAME = re.compile(
    r"(?!(?:dir|oci|oci-archive|docker|docker-archive|docker-daemon|containers-storage|tarball|sif|ostree|atomic):)"
    r"[a-z0-9][a-z0-9._-]*(?::\d+(?=/))?(?:/[a-z0-9][a-z0-9._-]*)*(?::\w[\w.-]*)?(?:@sha256:[0-9a-f]{64})?",
    re.ASCII | re.IGNORECASE,
)
"""A name in a registry. podman takes places of this machine too, by a word in front: dir:/etc."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])i?B?", re.IGNORECASE)
_MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


def _refused(why: str) -> AfterValidator:
    """For a key that cannot be honoured; as good as left out where it says nothing."""

    def check(value: Any) -> Any:
        if value not in (None, [], {}, 0, ""):
            raise ValueError(why)
        return value

    return AfterValidator(check)


def _megabytes(value: Any) -> Any:
    if isinstance(value, str) and (found := _SIZE.fullmatch(value.strip())):
        size = float(found[1]) * _MEGABYTES[found[2].upper()]
        return round(size) if math.isfinite(size) else value
    return value


_DAY = 86_400
Seconds = Annotated[float, Field(gt=0)]
Wait = Annotated[float, Field(gt=0, le=_DAY)]
Megabytes = Annotated[int | None, BeforeValidator(_megabytes)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class Networked(_Section):
    """A section that says what is reached."""

    network_mode: Network | None = None
    allowed_hosts: list[Annotated[str, AfterValidator(checked_host)]] = []

    @field_validator("allowed_hosts")
    @classmethod
    def _check_hosts(cls, hosts: list[str], info: ValidationInfo) -> list[str]:
        if hosts and info.data.get("network_mode") != "allowlist":
            raise ValueError('this is for network_mode = "allowlist"')
        return hosts

    @property
    def network_policy(self) -> NetworkPolicy | None:
        """What is reached; None where that is left to the environment."""
        return NetworkPolicy(self.network_mode, tuple(self.allowed_hosts)) if self.network_mode else None


_S = TypeVar("_S", bound=Networked)


class Healthcheck(_Section):
    """When the environment is ready."""

    command: str
    interval_sec: Wait = 5.0
    timeout_sec: Wait = 30.0
    start_period_sec: Annotated[float, Field(ge=0, le=_DAY)] = 0.0
    start_interval_sec: Wait = 5.0
    retries: Annotated[int, Field(ge=1, le=1000)] = 3


class EnvironmentSection(Networked):
    """`[environment]`: the box that the task is done in."""

    build_timeout_sec: Seconds = 600.0
    docker_image: Annotated[str | None, AfterValidator(lambda value: value and _image(value))] = None
    os: Annotated[str, AfterValidator(lambda value: _only(value, "linux"))] = "linux"
    cpus: Annotated[float | None, Field(gt=0)] = None
    memory_mb: Megabytes = Field(default=None, validation_alias=AliasChoices("memory_mb", "memory"))
    storage_mb: Megabytes = Field(default=None, validation_alias=AliasChoices("storage_mb", "storage"))
    """Of a pod; elsewhere a box has what its disk has, as in Harbor's own containers."""
    gpus: Annotated[int | None, _refused("a box has no GPU here")] = None
    gpu_types: Annotated[list[str] | None, _refused("a box has no GPU here")] = None
    tpu: Annotated[Any, _refused("a box has no TPU here")] = None
    workdir: str | None = None
    skills_dir: Annotated[str | None, _refused("skills are not handed to the agent here")] = None
    env: Mapping[str, str] = {}
    mcp_servers: Annotated[list[Any], _refused("MCP servers are not started here")] = []
    healthcheck: Healthcheck | None = None
    allow_internet: bool | None = None

    @property
    def network(self) -> Network:
        """What the box reaches besides its model."""
        return self.network_mode or ("no-network" if self.allow_internet is False else "public")

    @property
    def network_policy(self) -> NetworkPolicy:
        return NetworkPolicy(self.network, tuple(self.allowed_hosts))


class AgentSection(Networked):
    """`[agent]`"""

    timeout_sec: Seconds | None = None
    user: str | int | None = None


class Collect(_Section):
    """`[[verifier.collect]]`: a command in the box of a service whose results the verifier needs."""

    command: str
    service: Annotated[str, Field(pattern=_SERVICE)] = "main"
    timeout_sec: Seconds = 60.0
    user: str | int | None = None


class VerifierSection(Networked):
    """`[verifier]`"""

    timeout_sec: Seconds = 600.0
    env: Mapping[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentSection | None = None
    collect: list[Collect] = []

    @property
    def separate(self) -> bool:
        """Whether it runs in a box of its own, to which only artifacts cross over."""
        return (self.environment_mode or ("separate" if self.environment else "shared")) == "separate"


class Artifact(_Section):
    """What crosses over to a separate verifier."""

    source: Annotated[str, AfterValidator(lambda value: _inside(value))]
    destination: Annotated[str | None, AfterValidator(lambda value: value and _inside(value, relative=True))] = None
    """Where Harbor keeps it in the folder of a trial, which there is not here; a verifier finds it at its source."""
    exclude: list[str] = []
    """What of a folder is left out, as patterns of tar."""
    service: Annotated[str | None, Field(pattern=_SERVICE)] = None

    @model_validator(mode="after")
    def _check(self) -> Artifact:
        if self.service not in (None, "main") and not self.source.startswith("/"):
            raise ValueError(f"source {self.source!r} of the service {self.service} has to begin with /")
        return self


Artifacts = list[
    Annotated[Artifact, BeforeValidator(lambda value: {"source": value} if isinstance(value, str) else value)]
]


class Author(_Section):
    """Who wrote a task."""

    name: str
    email: str | None = None


class TaskSection(_Section):
    """`[task]`"""

    name: str
    version: str | None = None
    description: str = ""
    authors: list[Author] = []
    keywords: list[str] = []


class SolutionSection(_Section):
    """`[solution]`"""

    env: Mapping[str, str] = {}


class Step(_Section):
    """`[[steps]]`: one of several instructions, each verified by itself."""

    name: Annotated[str, Field(pattern=r"^[\w.-]+$")]
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    min_reward: float | Mapping[str, float] | None = None
    healthcheck: Healthcheck | None = None
    artifacts: Artifacts = []


class TaskFile(_Section):
    """task.toml"""

    schema_version: str = Field(default="1.4", validation_alias=AliasChoices("schema_version", "version"))
    task: TaskSection | None = None
    metadata: Mapping[str, Any] = {}
    source: str | None = None
    artifacts: Artifacts = []
    agent: AgentSection = AgentSection()
    verifier: VerifierSection = VerifierSection()
    solution: SolutionSection = SolutionSection()
    environment: EnvironmentSection = EnvironmentSection()
    steps: list[Step] = []
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


@dataclass(frozen=True, slots=True)
class VerifierBox:
    """The box of a verifier that has one of its own."""

    section: EnvironmentSection
    build: Path
    has_tests: bool
    """Whether its image is made for the tests and holds them."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one instruction is, where its files are, and how it is verified."""

    name: str
    instruction: str
    agent: AgentSection
    verifier: VerifierSection
    tests: tuple[Path, ...]
    """Folders with tests, laid over one another."""
    solution: Path
    apart: VerifierBox | None = None
    """Where it is verified; None where that is the agent's box."""
    workdir: Path | None = None
    """Files that are put into the working directory first."""
    healthcheck: Healthcheck | None = None
    artifacts: Sequence[Artifact] = ()
    min_reward: float | Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task's folder, read and checked."""

    folder: Path
    file: TaskFile
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        return self.file.task.name if self.file.task else self.folder.name

    @property
    def network_policies(self) -> tuple[NetworkPolicy, ...]:
        """What is reached in each phase of its box, that of its beginning first."""
        begun = self.file.environment.network_policy
        own = [section for s in self.stages for section in (s.agent, *(() if s.apart else (s.verifier,)))]
        return (begun, *(section.network_policy or begun for section in own))

    @property
    def compose(self) -> Path | None:
        """The file with its services, where it has several containers."""
        file = self.folder / "environment" / COMPOSE_FILE
        return file if file.is_file() or file.is_symlink() else None


def read_task(folder: Path) -> HarborTask:
    """The task in a folder. Raises ConfigError that names the file and the key where it cannot be done here."""
    path = folder / TASK_FILE
    _check_own(folder, path)
    try:
        file = TaskFile.model_validate(parsed_toml(read_text(path, _BYTES)))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_error(error)}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is no TOML: {error}.") from None
    _check_own(folder, *(folder / name for name in _USED), *(p for one in file.steps for p in _of_step(folder, one)))
    if ignored := next(_ignore_files(folder), None):
        raise ConfigError(f"{ignored}: which files of a task are left out is not read here. Delete it, or move them.")
    if (folder / "trajectory.json").is_file():
        raise ConfigError(f"{folder}: trajectory.json: an agent does not begin with an earlier trajectory here.")
    return HarborTask(folder, file, tuple(_stages(folder, file)))


def _stages(folder: Path, file: TaskFile) -> Iterator[Stage]:
    shared = folder / "tests"
    if not file.steps:
        instruction, apart = _text(folder / INSTRUCTION_FILE), _apart(folder, file)
        tests, solution = _with_script(folder, (shared,), apart), folder / "solution"
        yield Stage("", instruction, file.agent, file.verifier, tests, solution, apart, artifacts=file.artifacts)
    for step in file.steps:
        own = folder / "steps" / step.name
        apart = _apart(folder, file, step)
        yield Stage(
            step.name,
            _text(own / INSTRUCTION_FILE),
            _laid_over(step.agent, file.agent),
            _laid_over(step.verifier, file.verifier).model_copy(
                update={"collect": [*file.verifier.collect, *step.verifier.collect]}
            ),
            _with_script(own, tuple(place for place in (shared, own / "tests") if place.is_dir()), apart),
            own / "solution",
            apart,
            own / "workdir" if (own / "workdir").is_dir() else None,
            step.healthcheck,
            [*file.artifacts, *step.artifacts],
            step.min_reward,
        )


def _apart(folder: Path, file: TaskFile, step: Step | None = None) -> VerifierBox | None:
    """The box of a verifier, if it is apart. Its image is the step's before the task's, and the one of its name before
    that of the Dockerfile beside the tests; else it is the agent's. Raises ConfigError for one of several containers.
    """
    places = [(step.verifier, folder / "steps" / step.name / "tests")] if step else []
    places.append((file.verifier, folder / "tests"))
    if not next((v.separate for v, _ in places if v.environment_mode or v.environment), False):
        return None
    section = next((v.environment for v, _ in places if v.environment), file.environment)
    for verifier, tests in places:
        image = verifier.environment and verifier.environment.docker_image
        if not image and (tests / COMPOSE_FILE).is_file():
            raise ConfigError(f"{tests / COMPOSE_FILE}: a verifier apart has one container here.")
        if image or (tests / "Dockerfile").is_file():
            return VerifierBox(section.model_copy(update={"docker_image": image}), tests, has_tests=True)
    image = file.environment.docker_image
    return VerifierBox(section.model_copy(update={"docker_image": image}), folder / "environment", has_tests=False)


def _laid_over(own: _S, shared: _S) -> _S:
    """A step's section, with the task's where it says nothing. Of what is reached it says all or nothing."""
    own_names = own.model_fields_set | ({"allowed_hosts"} if "network_mode" in own.model_fields_set else set())
    return own.model_copy(update={name: value for name, value in shared if name not in own_names})


_USED = (
    INSTRUCTION_FILE,
    "environment",
    "environment/Dockerfile",
    "tests",
    "tests/Dockerfile",
    "tests/test.sh",
    "solution",
    "solution/solve.sh",
)
"""The files and folders of a task that are opened on this machine. Further links in them stay links in a box."""


def _of_step(folder: Path, step: Step) -> Iterator[Path]:
    own = folder / "steps" / step.name
    names = (INSTRUCTION_FILE, "tests", "tests/Dockerfile", "tests/test.sh", "solution", "solution/solve.sh", "workdir")
    return (own / name for name in names)


def _ignore_files(folder: Path) -> Iterator[Path]:
    places = ("tests", "solution", "steps/*/tests", "steps/*/solution")
    return (found for place in places for found in folder.glob(f"{place}/**/.harborignore"))


def _check_own(folder: Path, *places: Path) -> None:
    """Raises ConfigError for a place of a task's folder that a link takes somewhere else: what is there would be copied
    into the box."""
    for place in places:
        if not is_own(folder, place):
            raise ConfigError(f"{place} is a link to another place, which is not read for a task.")


def is_own(folder: Path, place: Path) -> bool:
    """Whether a place of a task's folder is in it, wherever links lead."""
    return Path(os.path.realpath(place)).is_relative_to(os.path.realpath(folder))


def _with_script(folder: Path, tests: tuple[Path, ...], apart: VerifierBox | None) -> tuple[Path, ...]:
    if not (apart and apart.has_tests) and not any((place / "test.sh").is_file() for place in tests):
        raise ConfigError(f"{folder} has no tests/test.sh, which verifies what was done.")
    return tests


def _text(path: Path) -> str:
    try:
        return read_text(path, _BYTES)
    except (OSError, ValueError) as error:
        why = f"{reason_of_file(error)}.{meant_by(path)}"
        raise ConfigError(f"{path}, the instruction for the agent, cannot be read: {why}") from None


def _inside(value: str, *, relative: bool = False) -> str:
    if ".." in Path(value).parts or (relative and (value.startswith("/") or not Path(value).parts)):
        raise ValueError(f"{value!r} has to be {'a relative path' if relative else 'a path'} without ..")
    return value


def _image(value: str) -> str:
    if not IMAGE_NAME.fullmatch(value):
        raise ValueError(f"{value!r} is no image's name in a registry")
    return value


def _only(value: str, known: str) -> str:
    if value != known:
        raise ValueError(f"only {known!r} is known here, and not {value!r}")
    return value


def first_error(error: ValidationError) -> str:
    """The first thing that is wrong, by the key's name, and how many more there are."""
    first, *more = error.errors()
    where = ".".join(str(part) for part in first["loc"])
    what = {"extra_forbidden": "the format has no such key", "missing": "this key has to be there"}.get(
        first["type"], str(first.get("ctx", {}).get("error") or first["msg"])
    )
    return f"{where}: {what}." + (f" And {len(more)} more." if more else "")


def resolved(env: Mapping[str, str], where: str, allowed: Collection[str]) -> dict[str, str]:
    """Variables with `${VAR}` and `${VAR:-default}` of this machine's environment in their values, which tasks may
    read where their names are allowed. Raises ConfigError for one that is not, or is not set and has no default."""

    def value(found: re.Match[str]) -> str:
        name, default = found[1], found[2]
        given = os.environ.get(name) if name in allowed else None
        if given is None and default is None:
            why = "is not set here" if name in allowed else "is this machine's: allow it with variables"
            raise ConfigError(f"{where} needs the environment variable {name}, which {why}.")
        return default if given is None else given

    return {name: _VARIABLE.sub(value, text) for name, text in env.items()}


def find_tasks(place: Path) -> list[Path]:
    """The folders of tasks: the place itself, or those below it, by name. Raises ConfigError where there are none."""
    if (place / TASK_FILE).is_file():
        return [place]
    if not place.is_dir():
        raise ConfigError(f"harbor:{place} is no folder. Give a task's folder, or one with tasks in it.")
    found = sorted(file.parent for depth in ("*", "*/*") for file in place.glob(f"{depth}/{TASK_FILE}"))
    if not found:
        raise ConfigError(f"There is no {TASK_FILE} in {place}, nor in the folders below it.")
    return found
