"""`agl runs` and `agl compare`: the runs in a folder, and two of them side by side. Read from their files."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from agentlightning.arguments import nearest
from agentlightning.cli.commands.look import CompareOptions, RunsOptions
from agentlightning.cli.curve import plot
from agentlightning.cli.opened import described, rows
from agentlightning.cli.store import run_around
from agentlightning.console import fitting_table, one_line, terminal
from agentlightning.errors import ConfigError
from agentlightning.files import meant_by
from agentlightning.metrics.intervals import widened
from agentlightning.metrics.standing import standing_in
from agentlightning.metrics.svg import points_of
from agentlightning.trainer.folder import METRICS_FILE
from agentlightning.trainer.live import RUN_FILE, connect
from agentlightning.trainer.sync import run_sync
from agentlightning.types.finding import counted


@dataclass(frozen=True, kw_only=True)
class Listed:
    """A run in one line."""

    folder: str
    algorithm: str
    agent: str
    going_on: bool
    status: str
    """running, succeeded, stopped by you, stopped, failed or died; damaged, where its files are …"""
    why: str | None
    """… and the reason, where there is one."""
    steps: int = 0
    of_steps: int | None = None
    reward_first: float | None = None
    reward_last: float | None = None
    val_last: float | None = None
    val_best: float | None = None
    """The highest of all validations, which is more than the model is worth: it was chosen by its luck, too …"""
    val_best_low: float | None = None
    """… so its 95 % interval takes into account how many there were."""
    val_best_high: float | None = None
    validations: int = 0
    seconds_per_step: float | None = None
    last_active: float
    """When its files were last written, in seconds since the epoch."""


def list_runs(options: RunsOptions) -> None:
    """Print the runs in a folder and below it, the latest first. Raises ConfigError for none."""
    folder = options.folder
    files = [*folder.glob(RUN_FILE), *folder.glob(f"*/{RUN_FILE}"), *folder.glob(f"*/*/{RUN_FILE}")]
    found = sorted((_listed_anyway(file.parent) for file in files), key=lambda run: -run.last_active)
    if not found:
        raise ConfigError(
            f"There is no run in '{folder}'. Runs are folders with a {RUN_FILE}; `agl train` makes one."
            f"{run_around(folder)}"
        )
    if options.as_json:
        terminal().print_json(json.dumps([asdict(run) for run in found]))
        return
    terminal().print(fitting_table([_cells(run) for run in found], terminal()))


def _cells(run: Listed) -> dict[str, Text]:
    """What a row says of a run, by the title of the column."""
    steps = f"{run.steps}" if run.of_steps is None else f"{run.steps}/{run.of_steps}"
    rise = "" if run.reward_last is None else f"{run.reward_first:.3f} → {run.reward_last:.3f}"
    return {
        "run": Text(one_line(run.folder)),
        "status": Text(run.status, _STYLES.get(run.status, "")),
        "steps": Text(steps),
        "reward": Text(rise),
        "val": Text("" if run.val_last is None else f"{run.val_last:.3f}"),
        "when": Text("now" if run.going_on else _ago(run.last_active), "dim"),
        "best": Text(_best(run)),
        "algorithm": Text(one_line(run.algorithm, 24)),
        "agent": Text(one_line(run.agent, 24)),
    }


_STYLES = {"running": "bold green", "failed": "red", "died": "red", "damaged": "red", "stopped": "yellow"}


async def _goes_on(folder: Path) -> bool:
    live = await connect(folder)
    if live is not None:
        await live.close()
    return live is not None


def _listed_anyway(folder: Path) -> Listed:
    """A run in one line, also one whose files are damaged: it hides no other run."""
    try:
        return _listed(folder)
    except ConfigError as error:
        return Listed(
            folder=str(folder),
            algorithm=str(described(folder).get("algorithm", "")),
            agent=str(described(folder).get("agent") or ""),
            going_on=False,
            status="damaged",
            why=str(error),
            last_active=_last_active(folder),
        )


def _last_active(folder: Path) -> float:
    files = [folder / name for name in (RUN_FILE, METRICS_FILE) if (folder / name).is_file()]
    return max((file.stat().st_mtime for file in files), default=folder.stat().st_mtime)


def _listed(folder: Path) -> Listed:
    about, metrics = described(folder), rows(folder)
    learned = [m for m in metrics if m.get("step")]
    rewards = [m["reward"] for m in learned if m.get("reward") is not None]
    validated = [m for m in metrics if m.get("val_reward") is not None]
    best = max(validated, key=lambda m: m["val_reward"], default={})
    low, high = _of_best(best, len(validated))
    going_on, stands = run_sync(_goes_on(folder)), standing_in(folder)
    return Listed(
        folder=str(folder),
        algorithm=str(about.get("algorithm", "")),
        agent=str(about.get("agent") or ""),
        going_on=going_on,
        status="running" if going_on else stands.word,
        why=None if going_on else stands.why,
        steps=len(learned),
        of_steps=learned[-1].get("steps") if learned else about.get("settings", {}).get("steps"),
        reward_first=rewards[0] if rewards else None,
        reward_last=rewards[-1] if rewards else None,
        val_last=validated[-1]["val_reward"] if validated else None,
        val_best=best.get("val_reward"),
        val_best_low=low,
        val_best_high=high,
        validations=len(validated),
        seconds_per_step=_seconds_per_step(learned),
        last_active=_last_active(folder),
    )


def _seconds_per_step(learned: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean time from the end of one step to that of the next. A pause before a run went on is no step's: there
    only the time counts since the step itself began to sample."""
    taken: list[float] = []
    for before, row in pairwise(row for row in learned if row.get("time") is not None):
        own = row["time"] - row["sampling_from"] if row.get("sampling_from") is not None else math.inf
        taken.append(min(row["time"] - before["time"], own))
    taken = [seconds for seconds in taken if seconds >= 0]  # of others the clock was set back
    return statistics.mean(taken) if taken else None


def _of_best(best: Mapping[str, Any], looks: int) -> tuple[float, float] | tuple[None, None]:
    """The interval of the best of so many validations; none where it was not written down."""
    if best.get("val_low") is None or best.get("val_high") is None:
        return None, None
    return widened(best["val_reward"], (best["val_low"], best["val_high"]), looks)


def _best(run: Listed) -> str:
    """The best validation and its interval, for people."""
    if run.val_best is None:
        return ""
    between = "" if run.val_best_low is None else f" ({run.val_best_low:.2f}–{run.val_best_high:.2f})"
    return f"{run.val_best:.3f}{between}"


def _ago(then: float) -> str:
    seconds = time.time() - then
    for limit, unit, size in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{counted(round(seconds / 86400), 'day')} ago"


# ---- two of them -----------------------------------------------------------------------------------------------------


def compare_runs(options: CompareOptions) -> None:
    """Print two runs side by side: a curve of both, what they came to, and in which settings they differ."""
    first, second, metric = options.first, options.second, options.metric
    for folder in (first, second):
        if not (folder / RUN_FILE).is_file():
            raise ConfigError(
                f"There is no run in '{folder}': it has no {RUN_FILE}. Give a run's folder; agl runs lists them."
                f"{meant_by(folder)}{run_around(folder)}"
            )
    if first.resolve() == second.resolve() and metric == "reward":
        raise ConfigError(f"{first} and {second} are the same run. Give two; agl runs lists them.")
    differ = difference(described(first), described(second))
    curves = {str(folder): points_of(rows(folder), metric) for folder in (first, second)}
    known = {name for folder in (first, second) for row in rows(folder) for name in row}
    if known and metric not in known:
        meant = nearest(metric, known)
        hint = f" Did you mean {meant}?" if meant else f" They have: {', '.join(sorted(known))}."
        raise ConfigError(f"--metric {metric}: neither run has such a metric.{hint}")
    summaries = [_listed(first), _listed(second)]
    if options.as_json:
        found = {"runs": [asdict(run) for run in summaries], "settings": differ, "curves": curves}
        terminal().print_json(json.dumps(found, default=repr))
        return
    terminal().print(Text(metric, style="bold"))
    terminal().print(plot(curves, min(terminal().width, 110)))
    terminal().print()
    terminal().print(_side_by_side(summaries))
    terminal().print()
    terminal().print(_settings(differ, str(first), str(second)))


def difference(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """In what two runs differ, by name: their algorithm, agent, version of the package and data, and their settings."""
    names = ("algorithm", "agent", "version", "commit", "tasks_hash")
    flat = [
        {**{k: run[k] for k in names if run.get(k) is not None}, **run.get("settings", {})} for run in (first, second)
    ]
    known = dict.fromkeys([*flat[0], *flat[1]])
    return {name: (flat[0].get(name), flat[1].get(name)) for name in known if flat[0].get(name) != flat[1].get(name)}


def _side_by_side(runs: list[Listed]) -> Table:
    table = _headed("", *[run.folder for run in runs])
    for name in ("steps", "reward_first", "reward_last", "validations", "val_last", "val_best", "seconds_per_step"):
        values = [_best(run) or "–" if name == "val_best" else _shown(asdict(run)[name]) for run in runs]
        table.add_row(name.replace("_", " "), *values)
    return table


_MOST_SETTINGS = 500
"""That are printed: algorithms have fewer."""


def _settings(differ: Mapping[str, tuple[Any, Any]], first: str, second: str) -> Table | Text:
    if not differ:
        return Text("Their settings are the same.")
    table = _headed("setting", first, second)
    for name, values in islice(differ.items(), _MOST_SETTINGS):
        table.add_row(Text(one_line(name)), *[Text(one_line(_shown(value))) for value in values])
    if len(differ) > _MOST_SETTINGS:
        table.add_row(f"and {len(differ) - _MOST_SETTINGS:,} others: --json has them all")
    return table


def _headed(*titles: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0))
    for title in titles:
        table.add_column(Text(one_line(title)), overflow="fold")
    return table


def _shown(value: Any) -> str:
    return "–" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
