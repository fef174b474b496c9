"""Checkpoints of a run: the model in Hugging Face format, the optimiser, and how far the run is. All or nothing.

checkpoints/step-000040/model/          loads with plain transformers; of several policies, a directory for peft each
checkpoints/step-000040/optimizer/      for resuming
checkpoints/step-000040/checkpoint.json written last: a directory without it is no checkpoint
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentlightning.algorithm.base import TrainingContext
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend import Backend
from agentlightning.errors import ConfigError
from agentlightning.files import atomic_write, is_held, shared_lock
from agentlightning.metrics.card import CARD_FILE, Kind, model_card
from agentlightning.metrics.sink import METRICS_FILE, RUN_FILE, read_metrics
from agentlightning.reading import read_object

CHECKPOINT_FILE = "checkpoint.json"


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """`step` steps are done, which took `position` tasks; `base_model` is what the run started from.

    `carried` are those of the tasks whose rollouts were still running. `val_reward` is what its validation came to, if
    it had one, and `val_low` the lower end of the 95 % interval of that.
    """

    step: int
    base_model: str
    seed: int
    position: int = 0
    val_reward: float | None = None
    val_low: float | None = None
    policies: Sequence[str] = ()
    """Several policies: `model` and `optimizer` hold a directory for each."""
    frozen: str | None = None
    """The alias of the base beside them."""
    carried: Sequence[int] = ()
    lora_rank: int | None = None
    tasks: int | None = None
    """How many there are in the data set."""
    weights: str | None = None
    """A name that no other weights have; rollouts say under which weights they were enqueued."""
    recipe: str | None = None
    """See `TrainingContext.recipe`."""
    parts: Mapping[str, Any] = field(default_factory=dict)
    """What the parts of the run keep, by their names."""
    learning: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the parts of each policy's updates keep, by policy and name."""


_PARTS_BEFORE = {"known_tasks": "curriculum", "league": "league", "replay": "replay"}
_LEARNING_BEFORE = {"baselines": "baseline", "scales": "scales"}
"""Where older checkpoints have the state of parts: there it has a key of its own."""
_OF_THE_RUN = ("base_model", "seed", "lora_rank", "policies", "tasks")
"""What cannot change within a run: the weights, the optimiser's state and the order of the tasks follow from them."""


def model_path(checkpoint: Path) -> Path:
    return checkpoint / "model"


@contextmanager
def served_model(name: str) -> Iterator[str]:
    """The model that a name means to those who serve one: a run's folder or a checkpoint stands for the model in it."""
    with held_checkpoint(Path(name)) as checkpoint:
        yield name if checkpoint is None else str(model_path(checkpoint))


@contextmanager
def held_checkpoint(run_dir: Path) -> Iterator[Path | None]:
    """The newest whole checkpoint of a run, which the run does not remove within the block however far it goes.

    `run_dir` may be a checkpoint itself. None where there is no checkpoint.
    """
    with ExitStack() as stack:
        yield _hold_newest(run_dir, stack)


def _hold_newest(run_dir: Path, stack: ExitStack) -> Path | None:
    while True:
        try:
            checkpoint = latest_checkpoint(run_dir)
        except ConfigError:
            return None
        with suppress(FileNotFoundError):  # removed since it was found: there is a newer one
            stack.enter_context(shared_lock(checkpoint / CHECKPOINT_FILE))
            if (checkpoint / CHECKPOINT_FILE).exists():
                return checkpoint


@contextmanager
def held_before(run_dir: Path, step: int) -> Iterator[Path | None]:
    """The last kept checkpoint from before a step was learned, held within the block; None where none is kept."""
    with ExitStack() as stack:
        found = [c for c in list_checkpoints(run_dir) if read_checkpoint(c).step < step]
        if found:
            stack.enter_context(shared_lock(found[-1] / CHECKPOINT_FILE))
        yield found[-1] if found else None


async def save_checkpoint(run_dir: Path, backend: Backend, info: CheckpointInfo) -> Path:
    """Write a checkpoint; it counts from the moment its json is there.

    Raises ConfigError where the run's folder is gone meanwhile, with the checkpoint written all the same.
    """
    is_gone = not _is_there(run_dir)
    checkpoint = run_dir / "checkpoints" / f"step-{info.step:06d}"
    (checkpoint / CHECKPOINT_FILE).unlink(
        missing_ok=True
    )  # of a step that is done again, half of each would be there meanwhile
    await backend.checkpoint(str(checkpoint))
    write_cards(run_dir, checkpoint, info)
    atomic_write(checkpoint / CHECKPOINT_FILE, json.dumps(asdict(info), indent=2))
    if is_gone:
        raise ConfigError(
            f"The run's folder {run_dir} was moved, renamed or deleted while the run went on, so the run stops here. "
            f"Its last weights are in {checkpoint}. Move that folder into checkpoints/ of the run's folder, wherever "
            "it is now, and go on with  agl train --resume FOLDER  (resume=)."
        )
    return checkpoint


def _is_there(run_dir: Path) -> bool:
    return run_dir.is_dir()


def write_cards(run_dir: Path, checkpoint: Path, info: CheckpointInfo) -> None:
    """A model card beside the weights of each policy."""
    for folder in (model_path(checkpoint) / policy for policy in info.policies or ("",)):
        if folder.is_dir():
            kind: Kind = "adapter" if (folder / "adapter_config.json").is_file() else "weights"
            atomic_write(folder / CARD_FILE, card_of(run_dir, info, kind))


def card_of(run_dir: Path, info: CheckpointInfo, kind: Kind) -> str:
    """The card of a checkpoint's model, or of what was made of it, by what is in the run's folder."""
    try:
        about = read_object(run_dir / RUN_FILE)
    except (OSError, ValueError):
        about = {}
    metrics = run_dir / METRICS_FILE
    rows = read_metrics(metrics) if metrics.is_file() else []
    return model_card(about, rows, step=info.step, base=info.base_model, kind=kind)


def read_checkpoint(checkpoint: Path) -> CheckpointInfo:
    """Raises ConfigError for a directory that is no (whole) checkpoint."""
    try:
        return info_from(read_object(checkpoint / CHECKPOINT_FILE))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{checkpoint} is not a whole checkpoint ({error}). Checkpoints lie in <run>/checkpoints/step-…"
        ) from error


def info_from(data: Mapping[str, Any]) -> CheckpointInfo:
    """What a checkpoint's file says; also one that was written before parts kept their state by name.

    Raises TypeError for a file that says something else.
    """
    known = dict(data)
    parts = {name: state for key, name in _PARTS_BEFORE.items() if (state := known.pop(key, None))}
    learning = {alias: _learning_from(state) for alias, state in known.pop("learning", {}).items()}
    return CheckpointInfo(**{**known, "parts": {**parts, **known.get("parts", {})}, "learning": learning})


def _learning_from(state: Mapping[str, Any]) -> dict[str, Any]:
    if "steps" not in state and "kl_coef" not in state:
        return dict(state)
    reference = {"coef": state.get("kl_coef"), "steps": state.get("steps")}
    found = {"reference": {key: value for key, value in reference.items() if value is not None}}
    return found | {name: state[key] for key, name in _LEARNING_BEFORE.items() if state.get(key)}


def info_of(settings: TrainingSettings, tasks: int) -> CheckpointInfo:
    """What a checkpoint says of a run on so many tasks, before its first step."""
    return CheckpointInfo(
        step=0,
        base_model=settings.model,
        seed=settings.seed,
        lora_rank=settings.lora_rank,
        policies=list(settings.adapters),
        frozen=settings.frozen,
        tasks=tasks,
    )


async def restore(context: TrainingContext, backend: Backend, now: CheckpointInfo) -> CheckpointInfo:
    """What the checkpoint to go on from says, once the backend has its weights; `now` if there is none.

    Raises ConfigError for a checkpoint of a run that was another one than `now` says.
    """
    if context.resume_from is None:
        return now
    info = read_checkpoint(context.resume_from)
    refuse_other_run(context.resume_from, info, now)
    await backend.restore(str(context.resume_from))
    return info


def refuse_other_run(checkpoint: Path, saved: CheckpointInfo, now: CheckpointInfo) -> None:
    """Raises ConfigError if a checkpoint is of a run with other settings than the one that would go on from it."""
    for name in _OF_THE_RUN:
        before, after = getattr(saved, name), getattr(now, name)
        same = list(before) == list(after) if name == "policies" else before == after
        if not same and not (name == "base_model" and Path(before).resolve() == Path(after).resolve()):
            setting = name.removeprefix("base_")
            raise ConfigError(
                f"The checkpoint {checkpoint} is of a run with {setting}={before!r}, and this one has {after!r}. "
                "Resume with what the run began with, or start a new one from its weights: "
                f"model='{model_path(checkpoint)}'."
            )


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Lists the complete checkpoints of a run, oldest first."""
    return sorted(file.parent for file in (run_dir / "checkpoints").glob(f"step-*/{CHECKPOINT_FILE}"))


def latest_checkpoint(run_dir: Path) -> Path:
    """The newest whole checkpoint of a run; `run_dir` may be a checkpoint itself."""
    if (run_dir / CHECKPOINT_FILE).is_file():
        return run_dir
    found = list_checkpoints(run_dir)
    if not found:
        raise ConfigError(f"There is no checkpoint to resume from in {run_dir}. {_where_they_are(run_dir)}".rstrip())
    return found[-1]


def _where_they_are(folder: Path) -> str:
    """What to give instead of a folder without a checkpoint."""
    place = folder if folder.is_dir() else folder.parent
    if list_checkpoints(place):
        return f"'{folder.name}' is none of the run's: give its folder, {place}."
    if (around := next(filter(list_checkpoints, folder.parents[:2]), None)) is not None:
        return f"It is inside the run {around}: give that."
    if not folder.is_dir():
        missing = f"'{folder}' is a file." if folder.exists() else f"The folder '{folder}' is not there."
    elif (folder / RUN_FILE).is_file():
        return (
            "The run stopped before its first checkpoint was saved, or its folder 'checkpoints' was moved or deleted. "
            "Start it again without --resume."
        )
    else:
        missing = "It is no run's folder."
    files = [
        file
        for at in {place.resolve(): place, Path.cwd() / "runs": Path("runs")}.values()
        for file in at.glob(f"*/checkpoints/step-*/{CHECKPOINT_FILE}")
    ]
    runs = list(dict.fromkeys(file.parents[2] for file in sorted(files, key=lambda file: file.stat().st_mtime)))
    which = ", the latest last" if len(runs) > 1 else ""
    return f"{missing} Runs with checkpoints{which}: {', '.join(map(str, runs[-3:]))}." if runs else missing


def set_aside_later(run_dir: Path, checkpoint: Path) -> list[Path]:
    """Rename the whole checkpoints of a run that come after the one it goes on from: they are of another course of it.

    Otherwise the next resume would take them for the newest. Returns where they are now.
    """
    moved: list[Path] = []
    for later in list_checkpoints(run_dir):
        if later.parent.resolve() == checkpoint.resolve().parent and later.name > checkpoint.name:
            aside = later.with_name(f"before-{time.strftime('%Y%m%d-%H%M%S')}-{later.name}")
            moved.append(later.rename(aside))
    return moved


def prune_checkpoints(run_dir: Path, keep_last: int) -> None:
    """Remove the checkpoints that are `superfluous`, but for held ones.

    What is left of older ones that were never finished, or whose removal was interrupted, goes too.
    """
    found = list_checkpoints(run_dir)
    removed = superfluous({c.name: read_checkpoint(c) for c in found}, keep_last)
    for checkpoint in found:
        if checkpoint.name in removed and not is_held(checkpoint / CHECKPOINT_FILE):
            (checkpoint / CHECKPOINT_FILE).unlink()
            shutil.rmtree(checkpoint, ignore_errors=True)
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if found and folder.name < found[-1].name and not (folder / CHECKPOINT_FILE).exists():
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def kept_while_used(checkpoint: Path, run_dir: Path, keep_last: int) -> Iterator[None]:
    """Within the block a run keeps the checkpoint that it goes on from, however far it goes: an engine that is started
    again loads its model from there."""
    with shared_lock(checkpoint / CHECKPOINT_FILE):
        yield
    prune_checkpoints(run_dir, keep_last)


def superfluous(infos: Mapping[str, CheckpointInfo], keep_last: int) -> set[str]:
    """The names of all checkpoints but the last `keep_last`, and the one that validated best.

    Best is the highest lower end of the interval of its validation reward, so that a lucky one of few tasks does not
    stand before a sure one of many; of older checkpoints, which do not have it, the reward itself.
    """
    rated = [
        (i.val_reward if i.val_low is None else i.val_low, n) for n, i in infos.items() if i.val_reward is not None
    ]
    best = {max(rated)[1]} if rated else set[str]()
    return {*sorted(infos)[:-keep_last]} - best
