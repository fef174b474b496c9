"""dataset.toml, which lists the tasks of a folder by name and digest. It changes nothing of what runs: all tasks of the
folder do, as in Harbor. A listed task that is not there is an error, and one that was changed since is warned of.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from agentlightning.environments.harbor.format import INSTRUCTION_FILE, TASK_FILE, first_error, is_own, read_task
from agentlightning.errors import ConfigError
from agentlightning.files import reason_of_file
from agentlightning.reading import parsed_toml, read_text

logger = logging.getLogger(__name__)

DATASET_FILE = "dataset.toml"
_FILES = (TASK_FILE, INSTRUCTION_FILE, "README.md", "trajectory.json")
_FOLDERS = ("environment", "tests", "solution", "steps")
_IGNORED = ("__pycache__", "*.pyc", ".DS_Store", "*.swp", "*.swo", "*~")
_RULES = (".gitignore", ".harborignore")
"""Files with rules of their own about which files count; then no digest is compared."""
_SHOWN = 10


class ListedTask(BaseModel):
    """A task of a data set, by its name and the digest of its files."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    digest: Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]


class DatasetFile(BaseModel):
    """dataset.toml, as far as it is looked at."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: dict[str, Any]
    tasks: list[ListedTask] = []
    files: list[Any] = []


def check_dataset(folder: Path, tasks: Sequence[Path]) -> None:
    """Compare a folder's dataset.toml, if there is one, with the tasks in it. Raises ConfigError for a file that is not
    in this form, and for a task that it lists and that is not there."""
    path = folder / DATASET_FILE
    if not path.is_file():
        return
    try:
        listed = DatasetFile.model_validate(parsed_toml(read_text(path))).tasks
    except ValidationError as error:
        raise ConfigError(f"{path}: {first_error(error)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {reason_of_file(error)}.") from None
    here = {read_task(task).name: task for task in tasks} if listed else {}
    if missing := [task.name for task in listed if task.name not in here]:
        raise ConfigError(
            f"{path} lists {_few(missing)}, and there is no such task in {folder}. Packages of Harbor's hub are not "
            "fetched here: download them with Harbor, or take them out of the list."
        )
    if changed := [task.name for task in listed if digest_of(here[task.name]) not in (None, task.digest)]:
        logger.warning("%s: changed since they were listed: %s. They run as they are.", path, _few(changed))


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def digest_of(task: Path) -> str | None:
    """The digest of a task's files as Harbor makes it; None where rules of the task say which files count, and where a
    link leads out of it."""
    if any(next(task.rglob(name), None) for name in _RULES):
        return None
    files = sorted((file.relative_to(task).as_posix(), file) for file in _files(task))
    if not all(is_own(task, file) for _, file in files):
        return None
    lines = (f"{name}\0{_content(file)}\n" for name, file in files)
    return f"sha256:{hashlib.sha256(''.join(lines).encode()).hexdigest()}"


def _content(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _files(task: Path) -> Iterator[Path]:
    yield from (task / name for name in _FILES if (task / name).is_file())
    for folder in _FOLDERS:
        for file in (task / folder).rglob("*"):
            parts = file.relative_to(task).parts
            if file.is_file() and not any(fnmatchcase(part, rule) for part in parts for rule in _IGNORED):
                yield file
