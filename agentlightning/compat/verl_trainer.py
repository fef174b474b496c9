"""The keys of VERL's configuration that are the trainer's: folder, names, trackers, port, going on with a run."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from agentlightning.algorithm.base import TrainerDefaults
from agentlightning.errors import ConfigError
from agentlightning.metrics.trackers import TRACKERS, as_sink

LOGGER, PROJECT, EXPERIMENT = "trainer.logger", "trainer.project_name", "trainer.experiment_name"
FOLDER, RESUME, RESUME_FROM = "trainer.default_local_dir", "trainer.resume_mode", "trainer.resume_from_path"
PORT = "agentlightning.port"
OF_THE_TRAINER = {
    LOGGER: f"Trainer(sinks=[…]), for {', '.join(TRACKERS)}; console and file are always on",
    PROJECT: "the trackers' project, and the start of the run folder's name",
    EXPERIMENT: "the name of the run's folder",
    FOLDER: "Trainer(run_dir=…)",
    RESUME: "auto: continues the run in trainer.default_local_dir, if there is one; resume_path: Trainer(resume=…)",
    RESUME_FROM: "with resume_mode=resume_path: Trainer(resume=…)",
    PORT: "Trainer(port=…)",
}
_ALWAYS = ("console", "file")


def trainer_defaults(flat: Mapping[str, Any]) -> TrainerDefaults:
    """What the keys say of the trainer. Raises ConfigError that names the key that cannot be."""
    project, experiment = flat.get(PROJECT), flat.get(EXPERIMENT)
    folder = Path(flat[FOLDER]) if flat.get(FOLDER) else None
    named = "-".join(re.sub(r"[^\w.-]+", "-", str(part)) for part in (project, experiment) if part)
    return TrainerDefaults(
        sinks=[_tracker(name, str(project or "agentlightning")) for name in _names(flat.get(LOGGER))],
        run_dir=folder,
        name=named or None,
        port=flat.get(PORT),
        resume=_resume(flat, folder),
    )


def _names(value: Any) -> Sequence[str]:
    names = [value] if isinstance(value, str) else list(value or ())
    return [name for name in names if name not in _ALWAYS]


def _tracker(name: str, project: str) -> Any:
    try:
        return as_sink(name, project)
    except ConfigError as error:
        known = ", ".join((*_ALWAYS, *TRACKERS))
        raise ConfigError(
            f"{LOGGER} asks for {name!r}: {error} Or take it out of the list, which may hold {known}."
        ) from None


def _resume(flat: Mapping[str, Any], folder: Path | None) -> Path | None:
    mode = flat.get(RESUME, "auto")
    if mode == "resume_path":
        if not flat.get(RESUME_FROM):
            raise ConfigError(f"{RESUME} is 'resume_path'; say from where: {RESUME_FROM}.")
        return Path(flat[RESUME_FROM])
    if mode not in ("auto", "disable"):
        raise ConfigError(f"{RESUME} is {mode!r}; it can be auto, disable or resume_path.")
    there = folder is not None and any((folder / "checkpoints").glob("*"))
    return folder if mode == "auto" and there else None
