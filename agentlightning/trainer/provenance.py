"""Where a run comes from: version, commit, machine and tasks, so that it can be told apart and done again."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentlightning.files import atomic_write
from agentlightning.litagent import LitAgent
from agentlightning.types import Dataset

TASKS_FILE, VAL_TASKS_FILE = "tasks.jsonl", "val_tasks.jsonl"
MOST_KEPT = 10_000
"""Tasks that are written to the run's folder, and that its hash is made of; of more the first."""
COMMIT_SECONDS = 5.0


def provenance(
    run_dir: Path, agent: LitAgent[Any], train: Dataset[Any] | None, val: Dataset[Any] | None
) -> dict[str, Any]:
    """What `run.json` says besides the settings. The tasks are written beside it; the commit is that of the agent's
    repository."""
    import agentlightning

    source = agent.origin[1]
    keep_tasks(run_dir, train, val)
    return {
        "version": agentlightning.__version__,
        **({"environment": known} if (known := _as_json(agent.environment)) is not None else {}),
        "commit": commit_of(Path(source).parent) if source else commit_of(Path.cwd(), changes=False),
        "python": platform.python_version(),
        "host": socket.gethostname(),
        "start_time": time.time(),
        "tasks": None if train is None else len(train),
        "tasks_hash": None if train is None else hash_of(train),
        "val_tasks": None if val is None else len(val),
        "val_tasks_hash": None if val is None else hash_of(val),
    }


def _as_json(value: Any) -> Any:
    """The value; None for one that JSON does not hold."""
    try:
        return json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return None


def code_of(agent: LitAgent[Any]) -> str:
    """A digest of the agent's name and file; of an agent without one, something that no other call returns."""
    name, source = agent.origin
    try:
        code = Path(source).read_bytes() if source else os.urandom(16)
    except OSError:
        code = os.urandom(16)
    return hashlib.blake2b(f"{name}\n".encode() + code, digest_size=16).hexdigest()


def recipe_of(settings: Any, code: str, given: Mapping[str, Any], about: Mapping[str, Any]) -> str:
    """A hash that is the same for runs that sample the same from the same weights, as far as can be seen: with the same
    `settings`, `code_of` the agent, resources that were `given`, and version, commit and tasks in their `provenance`.
    """
    known = [repr(settings), code, {name: repr(one) for name, one in sorted(given.items())}]
    known += [about[key] for key in ("version", "commit", "tasks_hash")]
    return hashlib.blake2b(json.dumps(known).encode(), digest_size=16).hexdigest()


def commit_of(folder: Path, *, changes: bool = True) -> str | None:
    """The commit that the folder is at, with `+` behind it where files were changed; None outside of a repository.

    Looking for `changes` runs what the repository's settings name (filters, a monitor), so only where its code is run.
    """
    try:
        head = _git(folder, "rev-parse", "HEAD")
        if not changes:
            return head
        return head + ("+" if _git(folder, "status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=folder, capture_output=True, text=True, check=True, timeout=COMMIT_SECONDS
    )
    return done.stdout.strip()


def hash_of(tasks: Dataset[Any]) -> str:
    """A hash that is the same for the same tasks in the same order."""
    digest = hashlib.blake2b(str(len(tasks)).encode(), digest_size=16)
    for line in _lines(tasks):
        digest.update(line.encode())
    return digest.hexdigest()


def keep_tasks(run_dir: Path, train: Dataset[Any] | None, val: Dataset[Any] | None) -> None:
    """Write the tasks into the run's folder, where there are not too many of them."""
    for name, tasks in ((TASKS_FILE, train), (VAL_TASKS_FILE, val)):
        if tasks is not None and len(tasks) <= MOST_KEPT:
            atomic_write(run_dir / name, "".join(_lines(tasks)))


def _lines(tasks: Dataset[Any]) -> list[str]:
    count = min(len(tasks), MOST_KEPT)
    return [json.dumps(tasks[n], default=_plain, ensure_ascii=False) + "\n" for n in range(count)]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else repr(value)
