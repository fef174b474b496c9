"""`agl watch`: a run in the terminal while it goes on: its curve, where it is, and what it waits for."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from agentlightning.cli.curve import plot
from agentlightning.cli.opened import OpenedRun, opened_run
from agentlightning.cli.safe import one_line, safe, terminal
from agentlightning.errors import StoreError
from agentlightning.metrics.svg import points_of
from agentlightning.trainer.sync import run_sync
from agentlightning.types import FINISHED_ROLLOUT, AttemptedRollout, Rollout, RolloutStatus, RunStatus

OPEN_SHOWN, SAID_SHOWN = 8, 4


def watch_run(path: Path, run_id: str | None, seconds: float, *, once: bool) -> None:
    """Show the run until it ends, anew every so many seconds; with `once` as it is now."""
    run_sync(_watch(path, run_id, seconds, once))


async def _watch(path: Path, run_id: str | None, seconds: float, once: bool) -> None:
    async with opened_run(path, run_id) as opened:
        frame, over = await _frame(opened)
        if once or over:
            terminal().print(frame)
            return
        with Live(frame, console=terminal(), auto_refresh=False) as live:
            while not over:
                await asyncio.sleep(seconds)
                try:
                    frame, over = await _frame(opened)
                except StoreError:  # its door closed with it
                    break
                live.update(frame, refresh=True)


async def _frame(opened: OpenedRun) -> tuple[RenderableType, bool]:
    """What is shown now, and whether the run is over."""
    store, run = opened.store, opened.run
    if run is not None:
        run = await store.get_run_by_id(run.run_id) or run
    runs = None if run is None else [run.run_id]
    steps = await opened.steps()
    waiting = [status for status in RolloutStatus if status not in FINISHED_ROLLOUT]
    page = await store.query_rollouts(run_id_in=runs, status_in=waiting, sort_by="start_time", limit=OPEN_SHOWN)
    said = [] if run is None else (await store.query_run_events(run.run_id, kind_in=["warning", "verdict"])).items
    over = run is None or run.status is not RunStatus.RUNNING
    curves = {"reward": points_of(steps, "reward"), "validation": points_of(steps, "val_reward")}
    parts: list[RenderableType] = [
        _head(opened, run, steps),
        plot(curves, min(terminal().width, 100)),
        *([Text(), await _open(store, list(page), page.total)] if page.total else []),
        *[Text(f"! {one_line(str(event.data.get('text', '')), 300)}", style="yellow") for event in said[-SAID_SHOWN:]],
    ]
    return Group(*parts), over


def _head(opened: OpenedRun, run: Any, steps: list[dict[str, Any]]) -> Text:
    last: dict[str, Any] = steps[-1] if steps else {}
    text = Text(safe(opened.name), style="bold")
    if run is not None:
        text.append(f"  {run.algorithm}  {run.status.value}", style="cyan")
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


async def _open(store: Any, rollouts: list[Rollout], total: int) -> Table:
    title = f"under way: {total}" + (f", the oldest {len(rollouts)} of them" if total > len(rollouts) else "")
    table = Table("rollout", "for", "last heard", "task", title=title, title_justify="left", box=None)
    for rollout in rollouts:
        claimed = isinstance(rollout, AttemptedRollout) and rollout.status not in ("queuing", "requeuing")
        last = "waiting for a runner"
        if claimed:
            page = await store.query_spans(
                rollout.rollout_id, "latest", sort_by="sequence_id", sort_order="desc", limit=1
            )
            last = page[0].name if len(page) else "it was claimed"
        age = f"{time.time() - rollout.start_time:.0f} s"
        table.add_row(
            rollout.rollout_id,
            age,
            Text(one_line(last, 40)),
            Text(one_line(str(rollout.input), 60), overflow="ellipsis"),
        )
    return table
