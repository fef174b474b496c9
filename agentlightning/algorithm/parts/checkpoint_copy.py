"""Copies of checkpoints at a place that outlives the machine: S3, GCS, a shared file system; by fsspec.

URL/run.json                            which run it is; a place holds one
URL/metrics.jsonl                       its steps so far
URL/step-000040/model/…, optimizer/…
URL/step-000040/checkpoint.json         written last: a directory without a whole one is no checkpoint
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Self

from agentlightning.algorithm.checkpoint import CHECKPOINT_FILE, info_from, list_checkpoints, superfluous
from agentlightning.algorithm.part import Part, RunHooks, RunScope
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_directory
from agentlightning.metrics.sink import METRICS_FILE, RUN_FILE
from agentlightning.reading import read_json, read_object

if TYPE_CHECKING:
    from agentlightning.metrics import Reporter

COPY_SECONDS = 3600.0
"""A copy that takes longer is reported as failed."""
NOT_COPIED = (
    "The checkpoint of step {step} was not copied to {url}: {problem}. It is in the run's folder, and copying is tried "
    "again with the next one."
)


def is_url(place: object) -> bool:
    """Whether a place is named by a URL, such as s3://bucket/run."""
    return isinstance(place, str) and "://" in place


def check_url(url: str) -> None:
    """Raises ConfigError where fsspec, or its package for this kind of place, is missing."""
    if not is_url(url):
        raise ConfigError(
            f"{url!r} is no URL. Give one such as s3://bucket/run, gs://bucket/run or file:///shared/run."
        )
    try:
        from fsspec import get_filesystem_class

        get_filesystem_class(url.split("://")[0])
    except (ImportError, ValueError) as error:
        raise ConfigError(
            f"Checkpoints cannot be copied to or from {url}: {error}. Install what is missing: "
            "pip install 'agentlightning[fsspec]', and for S3 s3fs, for GCS gcsfs."
        ) from error


class CheckpointCopy:
    """The checkpoints of one run at a URL: those that its folder has are copied, and the older ones pruned alike."""

    def __init__(self, url: str, keep_last: int) -> None:
        check_url(url)
        self.url = url
        self._keep_last = keep_last
        self._copying: asyncio.Task[None] | None = None

    async def update(self, run_dir: Path) -> str | None:
        """Copy what is missing there; why that failed, if it did. What failed is tried again by the next call."""
        if self._copying is not None and not self._copying.done():
            return f"the copy that began earlier is still not done after {COPY_SECONDS:.0f} s"
        self._copying = asyncio.create_task(asyncio.to_thread(self._update, run_dir))
        try:
            await asyncio.wait_for(asyncio.shield(self._copying), COPY_SECONDS)
        except ConfigError:
            raise
        except TimeoutError:
            return f"it was not done after {COPY_SECONDS:.0f} s"
        except Exception as error:  # a file system may raise anything; the run goes on without its copy
            return f"{type(error).__name__}: {error}"
        return None

    def _update(self, run_dir: Path) -> None:
        files, root = _open(self.url)
        self._refuse_another_run(files, root, run_dir)
        local = {checkpoint.name: checkpoint for checkpoint in list_checkpoints(run_dir)}
        there = _whole(files, root)
        for name, checkpoint in local.items():
            text = (checkpoint / CHECKPOINT_FILE).read_text()
            if there.get(name) != json.loads(text):
                _put(files, checkpoint, f"{root}/{name}", text)
        for name in (METRICS_FILE, RUN_FILE):
            if (run_dir / name).is_file():
                files.pipe_file(f"{root}/{name}", (run_dir / name).read_bytes())
        self._prune(files, root, newest=max(local, default=""))

    def _refuse_another_run(self, files: Any, root: str, run_dir: Path) -> None:
        there, here = _json_of(files, f"{root}/{RUN_FILE}"), _id_of(run_dir)
        if there is not None and there.get("run_id") != here:
            raise ConfigError(
                f"{self.url} has the checkpoints of another run, {there.get('run_id')}. Give this run a URL of its own."
            )

    def _prune(self, files: Any, root: str, newest: str) -> None:
        """Checkpoints that are later than the newest one here are of another course of the run."""
        infos = {name: info_from(about) for name, about in _whole(files, root).items()}
        current = {name: info for name, info in infos.items() if name <= newest}
        gone = superfluous(current, self._keep_last) | (infos.keys() - current.keys())
        for name in _steps(files, root):
            if name in gone or (name not in infos and name != newest):
                _remove(files, f"{root}/{name}")


def fetch_newest(url: str, run_dir: Path) -> Path:
    """Bring the newest whole checkpoint from a URL into a run's folder, with what the run was. Returns where it is.

    Raises ConfigError where there is none, or where the folder holds another run.
    """
    check_url(url)
    try:
        return _fetch_newest(url, run_dir)
    except OSError as error:
        raise ConfigError(f"The checkpoints at {url} cannot be read: {error}") from error


def _fetch_newest(url: str, run_dir: Path) -> Path:
    files, root = _open(url)
    whole = _whole(files, root)
    if not whole:
        raise ConfigError(f"There is no checkpoint to resume from at {url}.")
    about, here = _json_of(files, f"{root}/{RUN_FILE}"), run_dir / RUN_FILE
    if here.is_file() and about is not None and _id_of(run_dir) != about.get("run_id"):
        raise ConfigError(f"{run_dir} holds another run than {url}. Give another run_dir.")
    name = max(whole)
    checkpoint = run_dir / "checkpoints" / name
    known = checkpoint / CHECKPOINT_FILE
    if not (known.is_file() and read_json(known) == whole[name]):
        with atomic_directory(checkpoint) as work:
            _get(files, f"{root}/{name}", work)
    for file in (METRICS_FILE, RUN_FILE):
        if not (run_dir / file).is_file() and files.exists(f"{root}/{file}"):
            (run_dir / file).write_bytes(files.cat_file(f"{root}/{file}"))
    return checkpoint


def _id_of(run_dir: Path) -> str | None:
    try:
        return read_object(run_dir / RUN_FILE).get("run_id")
    except FileNotFoundError:
        return None


def _open(url: str) -> tuple[Any, str]:
    """The file system, without what it remembers of earlier listings, and the path in it."""
    from fsspec.core import url_to_fs

    files, root = url_to_fs(url)
    files.invalidate_cache()
    return files, root.rstrip("/")


def _steps(files: Any, root: str) -> list[str]:
    """Names of folders of checkpoints, whole or not."""
    if not files.isdir(root):
        return []
    names = (PurePosixPath(path).name for path in files.ls(root, detail=False))
    return sorted(name for name in names if name.startswith("step-"))


def _whole(files: Any, root: str) -> Mapping[str, dict[str, Any]]:
    """What the whole checkpoints say, by their names."""
    found = {name: _json_of(files, f"{root}/{name}/{CHECKPOINT_FILE}") for name in _steps(files, root)}
    return {name: about for name, about in found.items() if about is not None}


def _json_of(files: Any, path: str) -> dict[str, Any] | None:
    try:
        found = json.loads(files.cat_file(path))
    except (FileNotFoundError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _put(files: Any, checkpoint: Path, target: str, text: str) -> None:
    if files.exists(target):
        _remove(files, target)
    for path in sorted(checkpoint.rglob("*")):
        if path.is_file() and path != checkpoint / CHECKPOINT_FILE:
            there = f"{target}/{path.relative_to(checkpoint).as_posix()}"
            files.makedirs(there.rsplit("/", 1)[0], exist_ok=True)
            files.put_file(str(path), there)
    files.pipe_file(f"{target}/{CHECKPOINT_FILE}", text.encode())


def _remove(files: Any, target: str) -> None:
    """What is removed halfway is no checkpoint from the first moment on."""
    if files.exists(f"{target}/{CHECKPOINT_FILE}"):
        files.rm_file(f"{target}/{CHECKPOINT_FILE}")
    files.rm(target, recursive=True)


def _get(files: Any, source: str, work: Path) -> None:
    for path in files.find(source):
        inside = PurePosixPath(path).relative_to(source)
        if ".." in inside.parts:  # the names are data
            raise ConfigError(f"{path} leads out of its checkpoint.")
        (work / inside).parent.mkdir(parents=True, exist_ok=True)
        files.get_file(path, str(work / inside))


@dataclass(frozen=True, kw_only=True)
class Copies(Part):
    """Checkpoints are copied to a URL."""

    url: str
    keep: int

    @classmethod
    def of(cls, settings: TrainingSettings) -> Self | None:
        url = settings.checkpoint_copy
        return None if url is None else cls(url=url, keep=settings.keep_checkpoints)

    @classmethod
    def check(cls, settings: TrainingSettings) -> None:
        if settings.checkpoint_copy is not None:
            check_url(settings.checkpoint_copy)

    def in_run(self, run: RunScope) -> RunHooks:
        return _Copying(CheckpointCopy(self.url, self.keep), run.context.reporter)


class _Copying(RunHooks):
    def __init__(self, copy: CheckpointCopy, reporter: Reporter) -> None:
        self._copy = copy
        self._reporter = reporter

    async def saved(self, run_dir: Path, step: int) -> None:
        if (problem := await self._copy.update(run_dir)) is not None:
            self._reporter.warn(NOT_COPIED.format(step=step, url=self._copy.url, problem=problem))
