"""Data sets by the names that a registry of Harbor gives them: `NAME@VERSION`, or `NAME` for the newest version.

A registry is a JSON list of data sets, each a name, a version and its tasks: folders of a git repository at a commit,
or folders beside the registry's file. Tasks are read from it, and nothing of a registry is run. Metrics that it names
are not computed here.
"""

from __future__ import annotations

import asyncio
import difflib
import hashlib
import logging
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import aiohttp
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from agentlightning.environments.harbor.dataset import check_dataset
from agentlightning.environments.harbor.format import TASK_FILE, find_tasks, first_error
from agentlightning.environments.harbor.repository import cache_folder, fetched, inside
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write, reason_of_file
from agentlightning.net.outgoing import UnwantedAnswer, http_session, reason_of
from agentlightning.reading import parsed_json, read_text

logger = logging.getLogger(__name__)

PUBLIC_REGISTRY = "https://raw.githubusercontent.com/laude-institute/harbor/main/registry.json"
"""Harbor's own registry, which is read where no other one is given."""
_NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)?(?:@\w[\w.+-]*)?")
_SECONDS = 60.0
_LARGEST = 100_000_000
"""Bytes of a registry that are read at most."""
_VERSION = re.compile(r"v?(\d+(?:\.\d+)*)(.*)", re.IGNORECASE)
_LONGEST_VERSION = 100
"""Of one that is ordered by its numbers."""
_SHOWN = 20


class RegisteredTask(BaseModel):
    """Where a task of a data set is."""

    model_config = ConfigDict(frozen=True)

    name: str
    git_url: str | None = None
    git_commit_id: str | None = None
    path: Annotated[str, AfterValidator(lambda value: value.strip())]


class RegisteredDataset(BaseModel):
    """A version of a data set."""

    model_config = ConfigDict(frozen=True)

    name: str
    version: str
    tasks: list[RegisteredTask]


@dataclass(frozen=True, slots=True)
class TaskRegistry:
    """Where names are looked up: in a file, or at a URL."""

    path: str | None = None
    url: str | None = None

    def __post_init__(self) -> None:
        if self.path is not None and self.url is not None:
            raise ConfigError("Give registry_path or registry_url, not both.")
        if self.url is not None and not self.url.startswith(("https://", "http://")):
            raise ConfigError(f"registry_url is {self.url!r}; it begins with https://. For a file give registry_path.")

    @property
    def is_given(self) -> bool:
        return self.path is not None or self.url is not None

    @property
    def shown(self) -> str:
        """What it is called in messages."""
        return self.path or self.url or PUBLIC_REGISTRY

    def text(self) -> str:
        """What it holds. Raises ConfigError where it cannot be read."""
        if self.path is None:
            return _downloaded(self.url or PUBLIC_REGISTRY)
        try:
            return read_text(Path(self.path).expanduser(), _LARGEST)
        except (OSError, ValueError) as error:
            raise ConfigError(f"The registry {self.path} cannot be read: {reason_of_file(error)}.") from None


def task_folders(place: str, registry: TaskRegistry) -> list[Path]:
    """The folders of tasks that a folder or a name of a registry means.

    What is a folder here, or is written as a path, is one; with a registry of the user's own a name is always looked
    up. Raises ConfigError where there are no tasks, with the names or versions that there are.
    """
    folder = Path(place).expanduser().absolute()
    if not is_name(place, registry):
        found = find_tasks(folder)
        check_dataset(folder, found)
        return found
    name, _, version = place.partition("@")
    try:
        entries = _entries(registry)
    except ConfigError as error:
        raise ConfigError(f"{error} harbor:{place} is looked up there, because no folder has that name.") from None
    dataset = _chosen(entries, name, version or None, registry.shown)
    if not version:
        logger.info("%s is %s@%s.", name, name, dataset.version)
    return _folders(dataset, registry)


def is_name(place: str, registry: TaskRegistry) -> bool:
    """Whether a place is looked up in the registry."""
    return _NAME.fullmatch(place) is not None and (registry.is_given or not Path(place).exists())


# ---- the list --------------------------------------------------------------------------------------------------------


def _entries(registry: TaskRegistry) -> Sequence[Mapping[str, Any]]:
    """The data sets of a registry, as they stand there."""
    try:
        found = parsed_json(registry.text())
    except ValueError as error:
        raise ConfigError(f"The registry {registry.shown} is no JSON: {error}.") from None
    if not isinstance(found, list):
        raise ConfigError(f"The registry {registry.shown} is no list of data sets.")
    for number, entry in enumerate(found):
        given = [entry.get(key) for key in ("name", "version")] if isinstance(entry, dict) else []
        if not given or not all(isinstance(value, str) and value for value in given):
            raise ConfigError(f"The registry {registry.shown}: data set {number} has no name and version as texts.")
    return found


def _chosen(entries: Sequence[Mapping[str, Any]], name: str, version: str | None, shown: str) -> RegisteredDataset:
    """The data set of this name and version. Raises ConfigError that says which there are."""
    versions = {entry["version"]: entry for entry in entries if entry["name"] == name}
    if not versions:
        raise ConfigError(f"There is no folder {name} here, and no data set {name} in {shown}.{_like(name, entries)}")
    if version is None:
        version = newest(versions)
    if version not in versions:
        raise ConfigError(f"{shown} has no {name}@{version}. Its versions: {_listed(versions)}.")
    try:
        return RegisteredDataset.model_validate(versions[version])
    except ValidationError as error:
        raise ConfigError(f"The registry {shown}: {name}@{version}: {first_error(error)}") from None


def _like(name: str, entries: Iterable[Mapping[str, Any]]) -> str:
    """What was probably meant, or else some of the names."""
    names = list(dict.fromkeys(entry["name"] for entry in entries))
    like = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if like:
        return f" Did you mean {' or '.join(like)}?"
    packages = " Packages of Harbor's hub (ORGANISATION/NAME) are not fetched here." if "/" in name else ""
    return packages + (f" It has {_listed(sorted(names))}." if names else " It is empty.")


def _listed(names: Iterable[str]) -> str:
    every = list(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")


def newest(versions: Iterable[str]) -> str:
    """The version that a name alone means: `head`, else the highest number, else the last in the alphabet."""
    return max(versions, key=_order)


def _order(version: str) -> tuple[bool, bool, tuple[int, ...], bool, str]:
    matched = _VERSION.fullmatch(version) if len(version) <= _LONGEST_VERSION else None
    if matched is None:
        return version == "head", False, (), False, version
    numbers = [int(number) for number in matched[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    is_final = not re.match(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)", matched[2], re.IGNORECASE)
    return False, True, tuple(numbers), is_final, matched[2]


# ---- its tasks -------------------------------------------------------------------------------------------------------


def _folders(dataset: RegisteredDataset, registry: TaskRegistry) -> list[Path]:
    """The folders of a data set's tasks, fetched where they are not here. Raises ConfigError for what is missing."""
    where = f"{dataset.name}@{dataset.version}"
    if not dataset.tasks:
        raise ConfigError(f"{where} of {registry.shown} has no tasks.")
    wanted: dict[tuple[str, str | None], list[str]] = {}
    paths: list[tuple[RegisteredTask, str]] = []
    for task in dataset.tasks:
        try:
            path = inside(task.path) if task.git_url is not None else task.path
        except ValueError as error:
            raise ConfigError(f"{registry.shown}: {where}: the task {task.name}: {error}.") from None
        paths.append((task, path))
        if task.git_url is not None:
            if registry.path is None and task.git_url.lower().startswith("file:"):
                raise ConfigError(
                    f"{registry.shown}: {where}: the task {task.name} names a repository of this machine, which only a "
                    "registry in a file may do."
                )
            wanted.setdefault((task.git_url, task.git_commit_id), []).append(path)
    found: dict[tuple[str, str | None, str], Path] = {}
    for (url, commit), group in wanted.items():
        found |= {(url, commit, path): folder for path, folder in zip(group, fetched(url, commit, group), strict=True)}
    return [
        _local(task, registry, where) if task.git_url is None else found[task.git_url, task.git_commit_id, path]
        for task, path in paths
    ]


def _local(task: RegisteredTask, registry: TaskRegistry, where: str) -> Path:
    """A folder of this machine, which only a registry of this machine names."""
    if registry.path is None:
        raise ConfigError(f"{registry.shown}: {where}: the task {task.name} has no git_url, and no folder is at a URL.")
    path = Path(task.path).expanduser()
    folder = Path(registry.path).expanduser().absolute().parent / path
    for one in (folder, path.absolute()):  # Harbor itself begins at the working directory
        if (one / TASK_FILE).is_file():
            return one
    raise ConfigError(f"{registry.path}: {where}: the task {task.name}: there is no {TASK_FILE} in {folder}.")


# ---- a registry at a URL ---------------------------------------------------------------------------------------------


def _downloaded(url: str) -> str:
    """A registry at a URL. Where that cannot be reached, the copy that was read last is taken, which is said; without
    one ConfigError is raised."""
    copy = cache_folder() / "registries" / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}.json"
    try:
        with ThreadPoolExecutor(1) as thread:  # whether or not this one has an event loop
            text = thread.submit(lambda: asyncio.run(_body(url))).result()
    except (aiohttp.ClientError, TimeoutError, ValueError) as error:
        why = f"The registry {url} cannot be read: {reason_of(error)}."
        if isinstance(error, (UnwantedAnswer, ValueError)) or not copy.is_file():
            raise ConfigError(
                f"{why} A registry in a file needs no network: registry_path=FILE. Nor does a folder of tasks."
            ) from None
        age = (time.time() - copy.stat().st_mtime) / 3600
        logger.warning("%s The copy that was read %.0f hours ago is taken.", why, age)
        return copy.read_text("utf-8")
    with suppress(ValueError):  # what is no registry takes no other one's place
        if isinstance(parsed_json(text), list):
            atomic_write(copy, text)
    return text


async def _body(url: str) -> str:
    timeout = aiohttp.ClientTimeout(total=_SECONDS)
    async with http_session(most=_LARGEST, timeout=timeout, trust_env=True) as session, session.get(url) as answer:
        if answer.status != 200:
            raise ValueError(f"it answers {answer.status}")
        return (await answer.read()).decode("utf-8")
