"""`agl watch`: a run in the terminal while it goes on: its curve, where it is, and what it waits for."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentlightning.cli.commands.look import WatchOptions
from agentlightning.cli.curve import plot
from agentlightning.cli.opened import OpenedRun, opened_run
from agentlightning.console import one_line, safe, terminal
from agentlightning.errors import StoreError
from agentlightning.metrics.standing import Standing, is_alive, standing_of
from agentlightning.metrics.svg import points_of
from agentlightning.store.base import LightningStore
from agentlightning.trainer.sync import run_sync
from agentlightning.types import FINISHED_ROLLOUT, AttemptedRollout, Rollout, RolloutStatus, Run, RunStatus

OPEN_SHOWN, REPORTS_SHOWN = 8, 4


@dataclass(frozen=True, slots=True)
class RunStanding:
    """How a run stands."""

    run: Run | None
    steps: Sequence[Mapping[str, Any]]
    open: Sequence[tuple[Rollout, str]]
    """The oldest rollouts under way, each with what was last heard of it."""
    open_total: int
    reports: Sequence[str]
    """Its last warnings and verdicts."""
    over: bool
    """Nothing more comes of it: it ended, or its process is not there any more."""


def watch_run(options: WatchOptions) -> None:
    """Show the run until it ends, anew every so many seconds; with `once` or `as_json` as it is now."""
    run_sync(_watch(options))


async def _watch(options: WatchOptions) -> None:
    async with opened_run(options.run, options.run_id) as opened:
        now = await _look(opened)
        if options.as_json:
            terminal().print_json(json.dumps(_record(now, opened.standing), default=repr))
            return
        if options.once or now.over:
            terminal().print(_frame(opened, now))
            return
        with Live(_frame(opened, now), console=terminal(), auto_refresh=False) as live:
            while not now.over:
                await asyncio.sleep(options.seconds)
                try:
                    now = await _look(opened)
                except StoreError:  # its door closed with it
                    break
                live.update(_frame(opened, now), refresh=True)


async def _look(opened: OpenedRun) -> RunStanding:
    store, run = opened.store, opened.run
    if run is not None:
        run = await store.get_run_by_id(run.run_id) or run
    runs = None if run is None else [run.run_id]
    waiting = [status for status in RolloutStatus if status not in FINISHED_ROLLOUT]
    page = await store.query_rollouts(run_id_in=runs, status_in=waiting, sort_by="start_time", limit=OPEN_SHOWN)
    reports = [] if run is None else (await store.query_run_events(run.run_id, kind_in=["warning", "verdict"])).items
    return RunStanding(
        run,
        await opened.steps(),
        [(rollout, await _last_active_of(store, rollout)) for rollout in page],
        page.total,
        [str(event.data.get("text", "")) for event in reports[-REPORTS_SHOWN:]],
        run is None or standing_of(run, alive=is_alive(opened.folder)).word != RunStatus.RUNNING,
    )


async def _last_active_of(store: LightningStore, rollout: Rollout) -> str:
    if not isinstance(rollout, AttemptedRollout) or rollout.status in ("queuing", "requeuing"):
        return "waiting for a runner"
    page = await store.query_spans(rollout.rollout_id, "latest", sort_by="sequence_id", sort_order="desc", limit=1)
    return page[0].name if len(page) else "it was claimed"


def _record(now: RunStanding, standing: Standing) -> dict[str, Any]:
    """As JSON values."""
    last: Mapping[str, Any] = now.steps[-1] if now.steps else {}
    return {
        "run_id": now.run and now.run.run_id,
        "status": now.run and now.run.status.value,
        "standing": now.run and standing.word,
        "doing": now.run and now.run.state.get("doing"),
        "error": now.run and now.run.error,
        "step": last.get("step", 0),
        "steps": last.get("steps"),
        "seconds_left": last.get("seconds_left"),
        "reward": last.get("reward"),
        "rewards": points_of(now.steps, "reward"),
        "val_rewards": points_of(now.steps, "val_reward"),
        "under_way": now.open_total,
        "oldest": [
            {"rollout_id": r.rollout_id, "seconds": time.time() - r.start_time, "last_heard": last, "task": r.input}
            for r, last in now.open
        ],
        "said": list(now.reports),
    }


def _frame(opened: OpenedRun, now: RunStanding) -> RenderableType:
    """What is shown of it."""
    curves = {"reward": points_of(now.steps, "reward"), "validation": points_of(now.steps, "val_reward")}
    parts: list[RenderableType] = [
        _head(opened, now.run, now.steps),
        plot(curves, min(terminal().width, 100)),
        *([Text(), _open(now)] if now.open_total else []),
        *[Text(f"! {one_line(text, 300)}", style="yellow") for text in now.reports],
    ]
    return Group(*parts)


def _head(opened: OpenedRun, run: Run | None, steps: Sequence[Mapping[str, Any]]) -> Text:
    last: Mapping[str, Any] = steps[-1] if steps else {}
    text = Text(safe(opened.name), style="bold")
    if run is not None:
        text.append(f"  {run.algorithm}  {opened.standing.word}", style="cyan")
    done, total, left = last.get("step", 0), last.get("steps"), last.get("seconds_left")
    text.append(f"\nstep {done}" + (f"/{total}" if total else ""))
    if left:
        text.append(f", about {left / 60:.0f} min left" if left > 90 else f", about {left:.0f} s left")
    if last.get("reward") is not None:
        text.append(f", reward {last['reward']:.3f}")
    if run is not None and run.state.get("doing"):
        text.append(f"\n{one_line(str(run.state['doing']))}", style="dim")
    if run is not None and run.error:
        text.append(f"\n{one_line(run.error)}", style="red")
    return text


def _open(now: RunStanding) -> Table:
    oldest = f", the oldest {len(now.open)} of them" if now.open_total > len(now.open) else ""
    title = f"under way: {now.open_total}{oldest}"
    table = Table("rollout", "for", "last heard", "task", title=title, title_justify="left", box=None)
    for rollout, last in now.open:
        age = f"{time.time() - rollout.start_time:.0f} s"
        task = Text(one_line(str(rollout.input), 60), overflow="ellipsis")
        table.add_row(rollout.rollout_id, age, Text(one_line(last, 40)), task)
    return table
