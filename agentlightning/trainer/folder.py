"""A run's folder: the names of the files in it, a new one beside those there are, and what may not be overwritten."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path
from shlex import quote
from tempfile import TemporaryFile

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.checkpoint import latest_checkpoint
from agentlightning.algorithm.parts.checkpoint_copy import fetch_newest, is_url
from agentlightning.errors import ConfigError
from agentlightning.files import make_folder
from agentlightning.metrics import plot_curve
from agentlightning.metrics.sink import METRICS_FILE as METRICS_FILE, RUN_FILE as RUN_FILE
from agentlightning.models.weights import damage_of_checkpoint
from agentlightning.trainer.provenance import TASKS_FILE, VAL_TASKS_FILE

logger = logging.getLogger(__name__)

CURVE_FILE = "curve.png"
STORE_FILE = "store.db"


def new_folder(path: Path) -> Path:
    """The path, with a number behind it if it is taken."""
    numbered = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(p for p in itertools.chain([path], numbered) if not p.exists())


def default_folder(algorithm: Algorithm, resume_from: Path | None) -> Path:
    """A resumed run goes on in its folder; a new one gets a new folder."""
    if resume_from is not None:
        return resume_from.parent.parent
    stamp = time.strftime("%Y%m%d-%H%M%S")
    name = algorithm.trainer_defaults.name or type(algorithm).__name__.lower()
    return new_folder(Path("runs") / f"{name}-{stamp}")


def claimed(path: Path) -> Path:
    """The path, or with a number behind it, as a folder that was made here: two runs may begin in one second.

    Where no folder can be made it is the path all the same, and `prepare_folder` says why.
    """
    while True:
        free = new_folder(path)
        try:
            make_folder(free, new=True)
        except FileExistsError:
            continue
        except OSError:
            pass
        return free


def checkpoint_of(algorithm: Algorithm, resume: str | Path, run_dir: str | Path | None) -> Path:
    """The newest checkpoint of what to go on from. One at a URL is brought into the run's folder first."""
    if not is_url(resume):
        found = latest_checkpoint(Path(resume))
        if (words := damage_of_checkpoint(found, resuming=True)) is not None:
            raise ConfigError(f"{words} Give the checkpoint to go on from: --resume CHECKPOINT (resume=…).")
        return found
    return fetch_newest(str(resume), Path(run_dir) if run_dir else default_folder(algorithm, None))


def draw_curve(run_dir: Path) -> None:
    """Draw how the reward went, where there is something to draw."""
    try:
        plot_curve(run_dir / METRICS_FILE, run_dir / CURVE_FILE, run_dir.name)
    except ConfigError as error:
        logger.info("No curve was drawn: %s", error)


def resumable_journal(algorithm: Algorithm, resume: str | Path | None) -> Path | None:
    """The folder of the run to go on with, for an algorithm that keeps a journal; None for all others.

    Raises ConfigError where there is no run in it.
    """
    if resume is None or not algorithm.keeps_journal:
        return None
    if not (Path(resume) / RUN_FILE).is_file():
        raise ConfigError(f"There is no run in '{resume}' to go on with. Give the folder that it said it recorded in.")
    return Path(resume)


def prepare_folder(run_dir: Path, *, resuming: bool) -> None:
    """Make the folder. Raises ConfigError where it holds another run, or cannot be written to."""
    metrics = run_dir / METRICS_FILE
    if not resuming and metrics.is_file() and metrics.stat().st_size > 0:
        raise ConfigError(
            f"{run_dir} holds a run already, which would be overwritten. Give another run_dir (--run-dir). A run that "
            f"trains is gone on with by resume='{run_dir}', or --resume {quote(str(run_dir))} with agl train."
        )
    own = [name for name in (TASKS_FILE, VAL_TASKS_FILE) if (run_dir / name).exists()]
    if not resuming and own and not (run_dir / RUN_FILE).exists():
        raise ConfigError(
            f"{run_dir} holds {' and '.join(own)} and is no run's folder. A run writes files by these names, so yours "
            "would be lost. Give a new folder as run_dir (--run-dir)."
        )
    try:
        make_folder(run_dir)
        with TemporaryFile(dir=run_dir):
            pass
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(f"The run cannot write to {run_dir}: {why}. Give a run_dir where it can.") from error
