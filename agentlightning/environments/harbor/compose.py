"""A task's docker-compose.yaml: what of it is taken, and the services that it comes to.

The file is a stranger's. What a service, a network or a volume may have is a list, and everything else is refused by
its name before anything runs: what is not on the list could reach this machine. Variables are replaced here, with
Harbor's own, the task's and those that the user allows, and never by a program that sees our environment. The engine's
compose gets a file that is written from what was read here, and never the task's own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from agentlightning.environments.harbor.compose_keys import (
    NAME,
    SERVICE_KEYS,
    flag,
    listed,
    mapping,
    matching,
    named,
    place,
    scalar,
    seconds,
    settings_of,
)
from agentlightning.environments.harbor.format import COMPOSE_FILE, IMAGE_NAME, EnvironmentSection
from agentlightning.errors import ConfigError

MAIN = "main"
"""The service in which the agent and the verifier work."""
_MAIN_IMAGE = "agl-harbor-main"
"""What the variable MAIN_IMAGE_NAME holds: another service may have main's image."""
_LOGS = {"AGENT_LOGS": "/logs/agent", "VERIFIER_LOGS": "/logs/verifier", "ARTIFACTS": "/logs/artifacts"}
"""Harbor's variables of folders that services share with main, by the middle of their names."""
_BYTES, _VALUES, _DEPTH, _SERVICES = 200_000, 10_000, 20, 20
_REFERENCE = re.compile(
    r"\$(?:(?P<dollar>\$)|(?P<name>[a-z_]\w*)|\{(?P<braced>[a-z_]\w*)(?:(?P<how>:?-)(?P<default>[^{}$]*))?\}|)",
    re.ASCII | re.IGNORECASE,
)
_VARIABLE = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_CONDITIONS = ("service_started", "service_healthy", "service_completed_successfully")


@dataclass(frozen=True, slots=True)
class ImageRecipe:
    """How an image is built: a folder below the task's, a Dockerfile in it, what it is given."""

    context: Path
    dockerfile: Path
    arguments: Mapping[str, str] = field(default_factory=dict)
    target: str | None = None


@dataclass(frozen=True, slots=True)
class ServiceCheck:
    """How it is found that a service is ready."""

    command: Sequence[str]
    interval: float = 30.0
    timeout: float = 30.0
    start: float = 0.0
    retries: int = 3


@dataclass(frozen=True, slots=True)
class Mounted:
    """A volume of the project, or a file or folder of the task of which each attempt has a copy."""

    source: str | Path
    target: str
    read_only: bool = False


@dataclass(frozen=True, slots=True)
class Service:
    """One container of a task."""

    name: str
    image: str | ImageRecipe
    settings: Mapping[str, Any]
    """Keys that compose is given as they stand here."""
    environment: Mapping[str, str]
    networks: Mapping[str, Sequence[str]]
    """The networks it is in, with its further names there."""
    mounts: Sequence[Mounted]
    after: Mapping[str, str]
    """The services that come before it, and what is awaited of each."""
    check: ServiceCheck | None


@dataclass(frozen=True, slots=True)
class Composition:
    """The services of a task, checked."""

    services: Mapping[str, Service]
    networks: Mapping[str, bool]
    """The networks by name, and whether they lead nowhere else."""


def read_composition(
    build: Path, section: EnvironmentSection, environment: Mapping[str, str], allowed: Collection[str]
) -> Composition:
    """The services of a task's environment. Raises ConfigError that names the file and the key that is refused.

    Args:
        build: The task's folder with the file.
        section: `[environment]` of task.toml.
        environment: The task's own variables, which the file may use and main gets.
        allowed: Names of this machine's variables that the file may use.
    """
    file = build / COMPOSE_FILE
    try:
        known = {**_of_this_machine(allowed), **environment, **_of_harbor(build, section)}
        document = _Substitution(known).of(_parsed(file), "", 0)
        return _Reader(build.resolve(), section, environment).read(document)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _of_this_machine(allowed: Collection[str]) -> dict[str, str]:
    return {name: os.environ[name] for name in allowed if name in os.environ}


def _of_harbor(build: Path, section: EnvironmentSection) -> dict[str, str]:
    """The variables that Harbor gives to the file."""
    given = {"MAIN_IMAGE_NAME": _MAIN_IMAGE, "CONTEXT_DIR": str(build.resolve())}
    given |= {f"HOST_{name}_PATH": _volume_of(place) for name, place in _LOGS.items()}
    given |= {f"ENV_{name}_PATH": place for name, place in _LOGS.items()}
    given |= {"CPUS": f"{section.cpus:g}"} if section.cpus else {}
    given |= {"MEMORY": f"{section.memory_mb}M"} if section.memory_mb else {}
    return given | ({"PREBUILT_IMAGE_NAME": section.docker_image} if section.docker_image else {})


def _volume_of(place: str) -> str:
    return "agl" + place.replace("/", "-")


def _parsed(file: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError("reading it needs the package 'pyyaml': pip install pyyaml.") from None
    if not file.resolve().is_relative_to(file.parent.resolve()):
        raise ConfigError("it is a link to another place, which is not read for a task.")
    try:
        with file.open("rb") as opened:
            text = opened.read(_BYTES + 1)
        if len(text) > _BYTES:
            raise ConfigError(f"it is longer than {_BYTES:,} bytes.")
        return yaml.safe_load(text.decode())
    except (OSError, UnicodeDecodeError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"it cannot be read as YAML: {' '.join(str(error).split())[:300]}.") from None


class _Substitution:
    """Replaces variables in all values, and sees that there are not too many of those."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known, self._left = known, _VALUES

    def of(self, value: Any, where: str, depth: int) -> Any:
        self._left -= 1
        if self._left < 0 or depth > _DEPTH:
            raise ConfigError(f"it has more than {_VALUES:,} values, or they are nested deeper than {_DEPTH}.")
        if isinstance(value, Mapping):
            for key in value:
                if not isinstance(key, str):
                    raise ConfigError(f"{where or 'the file'}: the key {key!r} is no text; put it in quotes.")
            return {key: self.of(one, f"{where}.{key}".lstrip("."), depth + 1) for key, one in value.items()}
        if isinstance(value, list):
            return [self.of(one, where, depth + 1) for one in value]
        if isinstance(value, str):
            if "\0" in value:
                raise ConfigError(f"{where}: it holds a character that no program can be given.")
            return _REFERENCE.sub(lambda found: self._value(found, where), value)
        if value is not None and not isinstance(value, bool | int | float):
            raise ConfigError(f"{where}: {value} is a {type(value).__name__}; put it in quotes.")
        return value

    def _value(self, found: re.Match[str], where: str) -> str:
        if found["dollar"]:
            return "$"
        name = found["name"] or found["braced"]
        if name is None:
            raise ConfigError(
                f"{where}: {found.string[found.start() :][:40]} is no variable: ${{NAME}}, ${{NAME:-default}} and "
                "${NAME-default} are known here, and $$ is a dollar sign."
            )
        given = self._known.get(name)
        if given is None or (not given and found["how"] == ":-"):
            if found["default"] is None:
                raise ConfigError(
                    f"{where} needs the variable {name}. Set it in environment.env of task.toml; or, if this machine's "
                    "is meant, allow it with variables."
                )
            return found["default"]
        return given


class _Reader:
    """Makes services of a file whose variables are replaced."""

    def __init__(self, build: Path, section: EnvironmentSection, environment: Mapping[str, str]) -> None:
        self._build, self._section, self._environment = build, section, environment
        self._networks: Mapping[str, bool] = {}
        self._volumes: Collection[str] = ()

    def read(self, document: Any) -> Composition:
        top = mapping(document, "the file", ("services", "networks", "volumes", "version", "name"))
        self._networks = {"default": False} | {
            name: _network(one, f"networks.{name}") for name, one in named(top.get("networks"), "networks")
        }
        self._volumes = [_volume(one, name) for name, one in named(top.get("volumes"), "volumes")]
        given: dict[str, Any] = {MAIN: {}, **dict(named(top.get("services"), "services"))}
        if len(given) > _SERVICES:
            raise ConfigError(f"services: there are more than {_SERVICES}.")
        services = {name: self._service(name, one) for name, one in given.items()}
        services[MAIN] = _with_logs(services)
        image = services[MAIN].image
        services = {
            name: replace(one, image=image) if one.image == _MAIN_IMAGE else one for name, one in services.items()
        }
        _check_waits(services)
        networks = {network for service in services.values() for network in service.networks}
        return Composition(services, {name: inside for name, inside in self._networks.items() if name in networks})

    def _service(self, name: str, value: Any) -> Service:
        where = f"services.{name}"
        given = mapping(value, where, SERVICE_KEYS)
        environment = self._variables(given.get("environment"), f"{where}.environment")
        settings = settings_of(given, where)
        if name == MAIN:
            environment |= self._environment
            settings = {**({"cpus": self._section.cpus} if self._section.cpus else {}), **settings}
            settings = {**({"mem_limit": f"{self._section.memory_mb}m"} if self._section.memory_mb else {}), **settings}
        return Service(
            name=name,
            image=self._image(name, given, where),
            settings=settings,
            environment=environment,
            networks=self._networks_of(given, where),
            mounts=[
                self._mounted(one, f"{where}.volumes", f"agl-{name}-{number}")
                for number, one in enumerate(listed(given.get("volumes"), f"{where}.volumes"))
            ],
            after=_waits(given.get("depends_on"), f"{where}.depends_on"),
            check=_check(given.get("healthcheck"), f"{where}.healthcheck"),
        )

    def _variables(self, value: Any, where: str) -> dict[str, str]:
        """Variables with values: one without would have this machine's."""
        if isinstance(value, list):
            value = {name: text if sign else None for name, sign, text in (str(v).partition("=") for v in value)}
        variables: dict[str, str] = {}
        for name, text in mapping(value, where).items():
            if not _VARIABLE.fullmatch(name):
                raise ConfigError(f"{where}: {name!r} is no name of a variable.")
            if text is None:
                raise ConfigError(f"{where}.{name} has no value, and would have this machine's: write ${{{name}}}.")
            variables[name] = scalar(text, f"{where}.{name}")
        return variables

    def _image(self, name: str, given: Mapping[str, Any], where: str) -> str | ImageRecipe:
        """What a service runs: main as in Harbor, where a Dockerfile is built unless task.toml names an image."""
        if given.get("build") is not None:
            return self._recipe(given["build"], f"{where}.build")
        image = given.get("image")
        if name == MAIN:
            if self._section.docker_image is None and (self._build / "Dockerfile").is_file():
                return self._recipe(".", where)
            image = self._section.docker_image if image in (None, _MAIN_IMAGE) else image
        if image is None:
            more = ", environment/Dockerfile or docker_image in task.toml" if name == MAIN else ""
            raise ConfigError(f"{where} needs an image: give it image or build{more}.")
        if not isinstance(image, str) or not IMAGE_NAME.fullmatch(image):
            raise ConfigError(f"{where}.image: {image!r} is no image's name in a registry.")
        return image

    def _recipe(self, value: Any, where: str) -> ImageRecipe:
        given = mapping({"context": value} if isinstance(value, str) else value, where, _BUILD_KEYS)
        context = self._below(given.get("context") or ".", f"{where}.context")
        dockerfile = scalar(given.get("dockerfile") or "Dockerfile", f"{where}.dockerfile")
        target = given.get("target")
        return ImageRecipe(
            context,
            self._below(str(context / dockerfile), f"{where}.dockerfile"),
            self._variables(given.get("args"), f"{where}.args"),
            matching(NAME, target, f"{where}.target") if target else None,
        )

    def _below(self, path: Any, where: str) -> Path:
        """A file or folder of the task. Raises ConfigError for one of another place, and for a link there."""
        found = (self._build / scalar(path, where)).resolve()
        if not found.is_relative_to(self._build) or not found.exists():
            raise ConfigError(f"{where}: {path} is not in the task's folder environment.")
        return found

    def _networks_of(self, given: Mapping[str, Any], where: str) -> dict[str, Sequence[str]]:
        networks = given.get("networks") or ["default"]
        pairs = dict.fromkeys(networks) if isinstance(networks, list) else mapping(networks, f"{where}.networks")
        alias = given.get("container_name")
        more = [matching(NAME, alias, f"{where}.container_name")] if alias else []
        found: dict[str, Sequence[str]] = {}
        for name, value in pairs.items():
            if name not in self._networks:
                raise ConfigError(f"{where}.networks: there is no network {name}.")
            about = mapping(value, f"{where}.networks.{name}", ("aliases",))
            aliases = listed(about.get("aliases"), f"{where}.networks.{name}.aliases")
            found[name] = [*more, *(matching(NAME, one, f"{where}.networks.{name}.aliases") for one in aliases)]
        return found

    def _mounted(self, value: Any, where: str, own: str) -> Mounted:
        """A volume or a file of the task, as text or as a mapping."""
        if isinstance(value, str):
            *sources, target, mode = [*value.split(":"), "rw"] if value.count(":") < 2 else value.split(":")
            if mode not in ("ro", "rw") or len(sources) > 1:
                raise ConfigError(f"{where}: {value}: SOURCE:TARGET is known here, with :ro or :rw behind it.")
            value = {"source": sources[0] if sources else None, "target": target, "read_only": mode == "ro"}
        given = mapping(value, where, ("type", "source", "target", "read_only"))
        kind, source, target = given.get("type"), given.get("source"), place(given.get("target"), where)
        read_only = flag(given.get("read_only", False), where)
        if kind not in (None, "volume", "bind"):
            raise ConfigError(f"{where}: a mount of type {kind} is not taken from a task.")
        if source is None and kind != "bind":
            return Mounted(own, target, read_only)
        if kind == "bind" or (kind is None and str(source).startswith((".", "/", "~"))):
            return Mounted(self._below(source, where), target, read_only)
        source = scalar(source, where)
        if source not in self._volumes and source not in map(_volume_of, _LOGS.values()):
            raise ConfigError(f"{where}: {source} is not in volumes; a file or folder of the task begins with ./.")
        return Mounted(source, target, read_only)


_BUILD_KEYS = ("context", "dockerfile", "args", "target")
_CHECK_KEYS = ("test", "interval", "timeout", "start_period", "start_interval", "retries", "disable")


def _with_logs(services: Mapping[str, Service]) -> Service:
    """Main, with the folders of logs that it shares with other services."""
    main = services[MAIN]
    sources = {mount.source for service in services.values() for mount in service.mounts}
    targets = {mount.target for mount in main.mounts}
    shared = [Mounted(_volume_of(p), p) for p in _LOGS.values() if _volume_of(p) in sources and p not in targets]
    return replace(main, mounts=[*main.mounts, *shared])


def _check_waits(services: Mapping[str, Service]) -> None:
    for service in services.values():
        for name, condition in service.after.items():
            where = f"services.{service.name}.depends_on"
            if name not in services:
                raise ConfigError(f"{where}: there is no service {name}.")
            if condition == "service_healthy" and services[name].check is None:
                raise ConfigError(f"{where}.{name}: it is to be healthy, and services.{name} has no healthcheck.")
    in_waves(services)


def in_waves(services: Mapping[str, Service]) -> Sequence[Sequence[Service]]:
    """The services in the order in which they are started: each after those it depends on."""
    waves: list[list[Service]] = []
    left = dict(services)
    while left:
        wave = [service for service in left.values() if not set(service.after) & set(left)]
        if not wave:
            raise ConfigError(f"services: {', '.join(left)} wait for one another (depends_on).")
        waves.append(wave)
        left = {name: service for name, service in left.items() if service not in wave}
    return waves


def _waits(value: Any, where: str) -> dict[str, str]:
    if isinstance(value, list):
        return {scalar(name, where): "service_started" for name in value}
    waits: dict[str, str] = {}
    for name, one in mapping(value, where).items():
        condition = mapping(one, f"{where}.{name}", ("condition",)).get("condition", "service_started")
        if condition not in _CONDITIONS:
            raise ConfigError(f"{where}.{name}: {condition} is none of {', '.join(_CONDITIONS)}.")
        waits[name] = condition
    return waits


def _check(value: Any, where: str) -> ServiceCheck | None:
    given = mapping(value, where, _CHECK_KEYS)
    test = given.get("test")
    if test in (None, "NONE", ["NONE"]) or flag(given.get("disable", False), where):
        return None
    kind, *words = test if isinstance(test, list) and test else ["CMD-SHELL", test]
    if kind not in ("CMD", "CMD-SHELL") or not words or (kind == "CMD-SHELL" and len(words) != 1):
        raise ConfigError(f"{where}.test: it is a line of shell, or a list after CMD or CMD-SHELL.")
    command = [scalar(word, f"{where}.test") for word in words]
    times = {"interval": "interval", "timeout": "timeout", "start": "start_period"}
    retries = given.get("retries", 3)
    if not isinstance(retries, int) or not 1 <= retries <= 1000:
        raise ConfigError(f"{where}.retries: {retries!r} is no number from 1 to 1000.")
    return ServiceCheck(
        command if kind == "CMD" else ["sh", "-c", *command],
        **{own: seconds(given[key], f"{where}.{key}") for own, key in times.items() if key in given},
        retries=retries,
    )


def _network(value: Any, where: str) -> bool:
    """Whether a network leads nowhere else."""
    given = mapping(value, where, ("driver", "internal"))
    if given.get("driver", "bridge") != "bridge":
        raise ConfigError(f"{where}.driver: {given['driver']} is not taken from a task; bridge is.")
    return flag(given.get("internal", False), f"{where}.internal")


def _volume(value: Any, name: str) -> str:
    given = mapping(value, f"volumes.{name}", ("driver",))
    if given.get("driver", "local") != "local":
        raise ConfigError(f"volumes.{name}.driver: {given['driver']} is not taken from a task; local is.")
    return name
