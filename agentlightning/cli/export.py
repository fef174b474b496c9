"""`agl export --jsonl`: the good conversations of a run as a file that fine-tuning services accept."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from agentlightning.adapter.finetuning import fine_tuning_examples, to_jsonl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.recorded import Good, good_rollouts
from agentlightning.cli.opened import opened_run
from agentlightning.cli.safe import terminal
from agentlightning.errors import ConfigError
from agentlightning.store.base import LightningStore
from agentlightning.trainer.sync import run_sync
from agentlightning.types import Span
from agentlightning.types.names import CALL_ID


def export_conversations(run: Path, to: Path, form: str, good: Good, agent: str | None = None) -> int:
    """Write the conversations of a run's rollouts, and how many there are of which reward. Returns the lines written.

    Raises ConfigError where the file is there already, or where nothing would be in it.
    """
    if to.exists():
        raise ConfigError(f"'{to}' is there already; export to a new file.")
    episodes, text = run_sync(_read(run, form, good, agent))
    to.write_text(text, encoding="utf-8")
    rewards = Counter(round(e.reward or 0.0, 3) for e in episodes)
    told = ", ".join(f"{n} × {reward:g}" for reward, n in sorted(rewards.items(), reverse=True)[:5])
    written = text.count("\n")
    terminal().print(f"{to}: {written} conversations of {len(episodes)} rollouts in the form '{form}'. Rewards: {told}")
    return written


async def _read(run: Path, form: str, good: Good, agent: str | None = None) -> tuple[list[Episode], str]:
    async with opened_run(run) as opened:
        run_id = opened.run.run_id if opened.run is not None else None
        episodes = await good_rollouts(opened.store, run_id, good)
        if not episodes:
            raise ConfigError(f"No finished rollout of {run} has the reward that is asked for{_hint(good, agent)}.")
        lines: list[str] = []
        for episode in episodes:
            spans = await _taught(opened.store, episode)
            lines.append(to_jsonl(fine_tuning_examples(spans, form, agent_match=agent)))
    text = "".join(lines)
    if not text:
        raise ConfigError(
            f"The {len(episodes)} rollouts that were chosen hold no whole conversation{_hint(good, agent)}."
        )
    return episodes, text


async def _taught(store: LightningStore, episode: Episode) -> list[Span]:
    """The spans of a rollout without the calls of judges and other models, where some are those of a trained one."""
    spans = (await store.query_spans(episode.rollout.rollout_id, "latest")).items
    others = {c.info.call_id for c in episode.calls if not c.info.trained}
    if len(others) == len(episode.calls):
        return list(spans)
    return [s for s in spans if s.attributes.get(CALL_ID) not in others]


def _hint(good: Good, agent: str | None) -> str:
    named = [
        f"--min-reward {good.min_reward:g}" if good.min_reward is not None else "",
        f"--mode {good.mode.value}" if good.mode is not None else "",
        f"--agent {agent}" if agent is not None else "",
    ]
    given = " ".join(n for n in named if n)
    return f" (with {given})" if given else ""
