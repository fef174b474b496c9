"""`agl export --jsonl`, `--parquet` and `--atif`: what was said in a run, as files to train on elsewhere."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from agentlightning.adapter.atif import trajectory_of
from agentlightning.adapter.finetuning import Example, fine_tuning_examples, to_jsonl
from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.supervised import Good, good_rollouts
from agentlightning.cli.commands.serve import ExportOptions
from agentlightning.cli.opened import opened_run
from agentlightning.console import terminal
from agentlightning.errors import ConfigError, missing_extra
from agentlightning.files import atomic_directory
from agentlightning.store.base import LightningStore
from agentlightning.trainer.sync import run_sync
from agentlightning.types import RolloutMode, Span
from agentlightning.types.finding import counted
from agentlightning.types.names import CALL_ID


def export_files(options: ExportOptions) -> None:
    """Write the conversations that were asked for to the files of `--jsonl` and `--parquet`."""
    if options.to is not None or options.push is not None or options.merged or options.gguf:
        raise ConfigError(
            "--jsonl, --parquet and --atif write what was said; the model is exported by a command of its own."
        )
    if options.parquet is not None and options.parquet.suffix != ".parquet":
        raise ConfigError(f"--parquet {options.parquet}: the name of the file should end in .parquet.")
    try:
        re.compile(options.agent or "")
    except re.error as error:
        raise ConfigError(f"--agent {options.agent} is no regular expression: {error}. Escape the character.") from None
    good = Good(
        min_reward=options.min_reward,
        best_of=1 if options.best_per_task else None,
        mode=None if options.mode is None else RolloutMode(options.mode),
    )
    for file in filter(None, (options.jsonl, options.parquet)):
        export_conversations(Path(options.source), file, options.form, good, options.agent)
    if options.atif is not None:
        export_trajectories(Path(options.source), options.atif, good)


def export_conversations(run: Path, to: Path, form: str, good: Good, agent: str | None = None) -> int:
    """Write the conversations of a run's rollouts, and say how many there are of which reward.

    A file that ends in `.parquet` gets a table with the columns `messages`, `tools` (JSON, since each schema has fields
    of its own), `reward`, `task` (JSON) and `rollout_id`; any other the lines of the service's form. Returns how many
    conversations were written. Raises ConfigError where the file is there already, or where nothing would be in it.
    """
    if to.exists():
        raise ConfigError(f"'{to}' is there already; export to a new file.")
    write = _write_parquet if to.suffix == ".parquet" else _write_jsonl
    conversations = run_sync(_read(run, form, good, agent))
    write(to, conversations)
    rewards = Counter(round(episode.reward, 3) for episode, _ in conversations if episode.reward is not None)
    of_rewards = ", ".join(f"{n} × {reward:g}" for reward, n in sorted(rewards.items(), reverse=True)[:5]) or "none"
    written = sum(len(examples) for _, examples in conversations)
    terminal().print(
        f"{to}: {counted(written, 'conversation')} of {counted(len(conversations), 'rollout')} in the form "
        f"'{form}'. Rewards: {of_rewards}"
    )
    return written


def export_trajectories(run: Path, to: Path, good: Good) -> int:
    """Write the trajectories of a run's rollouts in ATIF, a file for each in a new folder. Returns how many. Raises
    ConfigError where the folder is there already, or where nothing would be in it."""
    if to.exists():
        raise ConfigError(f"'{to}' is there already; export to a new folder.")
    found = run_sync(_trajectories(run, good))
    with atomic_directory(to) as folder:
        for name, trajectory in found.items():
            (folder / f"{name}.json").write_text(json.dumps(trajectory, ensure_ascii=False), encoding="utf-8")
    embedded = sum(len(one.get("subagent_trajectories", ())) for one in found.values())
    terminal().print(f"{to}: {len(found)} trajectories, with {embedded} of sub-agents and branches in them.")
    return len(found)


async def _trajectories(run: Path, good: Good) -> dict[str, Any]:
    """By rollout."""
    found: dict[str, Any] = {}
    async with opened_run(run) as opened:
        run_id = opened.run.run_id if opened.run is not None else None
        for episode in await good_rollouts(opened.store, run_id, good):
            trajectory = await trajectory_of_episode(opened.store, episode)
            if trajectory is not None:
                found[episode.rollout.rollout_id] = trajectory
    if not found:
        raise ConfigError(f"No finished rollout of {run} has a model call{_hint(good, None)}.")
    return found


async def trajectory_of_episode(store: LightningStore, episode: Episode) -> dict[str, Any] | None:
    """As JSON has it; None where no call was answered."""
    rollout, attempt = episode.rollout, episode.attempt
    return trajectory_of(
        (await store.query_spans(rollout.rollout_id, "latest")).items,
        episode.calls,
        session_id=rollout.rollout_id,
        trajectory_id=attempt.attempt_id if attempt else rollout.rollout_id,
        extra={"reward": episode.reward, "outcome": str(episode.outcome), "task": rollout.input},
    )


def _write_jsonl(to: Path, conversations: Sequence[tuple[Episode, list[Example]]]) -> None:
    to.write_text("".join(to_jsonl(examples) for _, examples in conversations), encoding="utf-8")


def _write_parquet(to: Path, conversations: Sequence[tuple[Episode, list[Example]]]) -> None:
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise missing_extra("parquet", "pyarrow") from None
    rows = [
        {
            "messages": example["messages"],
            "tools": json.dumps(example["tools"], ensure_ascii=False) if "tools" in example else None,
            "reward": episode.reward,
            "task": json.dumps(episode.rollout.input, ensure_ascii=False),
            "rollout_id": episode.rollout.rollout_id,
        }
        for episode, examples in conversations
        for example in examples
    ]
    parquet.write_table(pa.Table.from_pylist(rows), to)


async def _read(run: Path, form: str, good: Good, agent: str | None = None) -> list[tuple[Episode, list[Example]]]:
    async with opened_run(run) as opened:
        run_id = opened.run.run_id if opened.run is not None else None
        episodes = await good_rollouts(opened.store, run_id, good)
        if not episodes:
            raise ConfigError(f"No finished rollout of {run} has such a reward{_hint(good, agent)}.")
        conversations: list[tuple[Episode, list[Example]]] = []
        for episode in episodes:
            spans = await _taught(opened.store, episode)
            conversations.append((episode, fine_tuning_examples(spans, form, agent_match=agent)))
    if not any(examples for _, examples in conversations):
        raise ConfigError(
            f"Of {counted(len(episodes), 'chosen rollout')} none holds a whole conversation{_hint(good, agent)}."
        )
    return conversations


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
