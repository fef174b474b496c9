"""`agl show`: what was said in the rollouts of a run."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console, Group
from rich.panel import Panel
from rich.text import Text

from agentlightning.algorithm.episode import Episode, collect
from agentlightning.cli.store import Location, location_of
from agentlightning.cli.transcript import transcript
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.trainer.sync import run_sync
from agentlightning.types import RolloutStatus

console = Console(highlight=False)


def show_rollouts(run: Path, rollout_id: str | None, *, failed: bool, limit: int, full: bool = False) -> None:
    """Print the transcripts of one rollout, or of the last ones. Raises ConfigError where there are none."""
    run_sync(_show(location_of(run), rollout_id, failed, limit, full))


async def _show(where: Location, rollout_id: str | None, failed: bool, limit: int, full: bool) -> None:
    async with where.reading() as store:
        found = await store.query_rollouts(
            rollout_id_in=[rollout_id] if rollout_id else None,
            status_in=[RolloutStatus.FAILED if failed else RolloutStatus.SUCCEEDED, RolloutStatus.FAILED],
            sort_by="start_time",
            sort_order="desc",
            limit=limit,
        )
        if not found:
            what = f"rollout '{rollout_id}'" if rollout_id else "failed rollout" if failed else "finished rollout"
            raise ConfigError(f"There is no {what} in {where}.")
        for episode in reversed(await collect(store, [r.rollout_id for r in found])):
            console.print(await _panel(store, episode, full))


async def _panel(store: LightningStore, episode: Episode, full: bool) -> Panel:
    rollout = episode.rollout
    spans = (await store.query_spans(rollout.rollout_id, "latest")).items
    parts = [Text(f"task  {json.dumps(rollout.input, ensure_ascii=False)}", style="dim"), transcript(spans, full=full)]
    if episode.attempt is not None and episode.attempt.error:
        parts.append(Text(episode.attempt.error, style="red"))
    step = rollout.metadata.get("step")
    words = [
        rollout.mode.value if rollout.mode else "",
        "" if step is None else f"step {step}",
        "no reward" if episode.reward is None else f"reward {episode.reward:g}",
        episode.outcome.value,
    ]
    style, width = "green" if episode.good and episode.reward else "red", min(console.width, 100)
    title = ", ".join(filter(None, words))
    return Panel(Group(*parts), title=title, subtitle=rollout.rollout_id, width=width, border_style=style)
