"""`agl show`: what was said in the rollouts of a run; those of a group side by side, with their advantages."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from shlex import quote
from typing import Any

import msgspec
from rich.columns import Columns
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from agentlightning.adapter.conversations import conversations
from agentlightning.algorithm.credit.advantage import ADVANTAGES
from agentlightning.algorithm.episode import Episode, collect
from agentlightning.cli.commands.look import ShowOptions
from agentlightning.cli.opened import OpenedRun, check_order, opened_run
from agentlightning.cli.transcript import log, transcript
from agentlightning.console import safe, terminal
from agentlightning.errors import ConfigError
from agentlightning.gateway.replay import EDITED
from agentlightning.trainer.sync import run_sync
from agentlightning.types import Call, Outcome, RolloutStatus, Span
from agentlightning.types.call import left_out_of, spent_of
from agentlightning.types.finding import counted
from agentlightning.types.names import OPERATION_NAME, REPLAYED_FROM


def _query(wanted: ShowOptions) -> dict[str, Any]:
    """As keywords of the store's query."""
    return {
        "rollout_id_in": [wanted.rollout] if wanted.rollout else None,
        "status_in": [RolloutStatus.FAILED if wanted.failed else RolloutStatus.SUCCEEDED, RolloutStatus.FAILED],
        "step_in": None if wanted.step is None else [wanted.step],
        "group_in": None if wanted.group is None else [wanted.group],
        "outcome_in": None if wanted.outcome is None else [Outcome(wanted.outcome)],
        "text_contains": wanted.task,
        "reward_min": wanted.reward_min,
        "reward_max": wanted.reward_max,
    }


def show_rollouts(wanted: ShowOptions) -> None:
    """Print the transcripts of one rollout, or of the last ones. Raises ConfigError where there are none."""
    check_order(wanted.run, wanted.rollout)
    low, high = wanted.reward_min, wanted.reward_max
    if low is not None and high is not None and low > high:
        raise ConfigError(f"--reward-min {low:g} is above --reward-max {high:g}, so no reward is between them.")
    run_sync(_show(wanted))


async def _there_are(opened: OpenedRun, wanted: ShowOptions) -> str:
    """What rollouts there are where those that were wanted are not."""
    last = await opened.store.query_rollouts(sort_by="start_time", sort_order="desc", limit=_LOOKED_AT)
    if not last:
        if opened.standing.word == "running":
            return " It has no rollouts yet."
        return f" It ended without any; what it measured is shown by  agl why {quote(str(wanted.run))}"
    if wanted.rollout is not None:
        option = (
            {1: "--step", 2: "--group"}.get(len(wanted.rollout.split("-"))) if wanted.rollout[:1].isdigit() else None
        )
        meant = f" Did you mean {option} {wanted.rollout}?" if option else ""
        return f"{meant} The last one is {last[0].rollout_id}; agl show RUN prints the last ones."
    episodes = await collect(opened.store, [r.rollout_id for r in last])
    names = [r.group for r in last if r.group is not None]
    if wanted.group is not None and names and wanted.group not in names:
        return f" A group is named by its step and its number there; the last one is {names[0]}."
    phrases = [f"The last {len(last)}"]
    steps = [r.step for r in last if r.step is not None]
    rewards = [e.reward for e in episodes if e.reward is not None]
    phrases += [f"are of steps {min(steps)} to {max(steps)}"] if steps else []
    phrases += [f"earned {min(rewards):g} to {max(rewards):g}"] if rewards else []
    ended = Counter(
        e.attempt.outcome.value for e in episodes if e.attempt is not None and e.attempt.outcome is not None
    )
    phrases += [f"ended {', '.join(f'{name} ({count})' for name, count in ended.items())}"] if ended else []
    return f" {phrases[0]} {'; '.join(phrases[1:])}." if phrases[1:] else ""


_LOOKED_AT = 1000
"""Rollouts that are looked at to say what there is."""


async def _show(wanted: ShowOptions) -> None:
    async with opened_run(wanted.run) as opened:
        limit = -1 if wanted.group is not None else wanted.limit
        found = await opened.store.query_rollouts(
            **_query(wanted), sort_by="start_time", sort_order="desc", limit=limit
        )
        if not found:
            raise ConfigError(f"There is no {_what(wanted)} in {wanted.run}.{await _there_are(opened, wanted)}")
        episodes = list(reversed(await collect(opened.store, [r.rollout_id for r in found])))
        if wanted.group is not None:  # the best first
            episodes.sort(key=lambda e: -math.inf if e.reward is None else e.reward, reverse=True)
        spans = [(await opened.store.query_spans(e.rollout.rollout_id, "latest")).items for e in episodes]
        advantages = advantages_of(opened, episodes) if wanted.group is not None else [None] * len(episodes)
    if wanted.as_json:
        shown = [as_record(e, s, a) for e, s, a in zip(episodes, spans, advantages, strict=True)]
        terminal().print_json(json.dumps(shown, default=repr))
        return
    side_by_side = wanted.group is not None and terminal().width >= 100
    width = (terminal().width - 2) // 2 if side_by_side else min(terminal().width, 100)
    if wanted.log and not any(str(log(own)) for own in spans):
        terminal().print(
            f"No message in {counted(len(episodes), 'rollout')}: --log shows what an agent says with emit_message. "
            "Without --log the calls of the model are shown."
        )
        return
    panels = [_panel(e, s, wanted, width, a) for e, s, a in zip(episodes, spans, advantages, strict=True)]
    if side_by_side:
        terminal().print(Columns(panels))
        return
    for panel in panels:
        terminal().print(panel)


def _what(wanted: ShowOptions) -> str:
    """What was not found: in the words of the options, since each of them may be the one that nothing fits."""
    names = ("step", "task", "outcome", "reward_min", "reward_max", "group")
    options = {f"--{name.replace('_', '-')}": getattr(wanted, name) for name in names}
    given = [f"{option} {value}" for option, value in options.items() if value is not None]
    what = f"rollout '{wanted.rollout}'" if wanted.rollout else "rollout"
    what = f"failed {what}" if wanted.failed else f"finished {what}" if given else what
    return f"{what} with {' '.join(given)}" if given else what


def advantages_of(opened: OpenedRun, episodes: Sequence[Episode]) -> list[float | None]:
    """What siblings are worth by the run's own advantage (GRPO's, where that is the user's own function)."""
    import numpy as np

    estimator = ADVANTAGES.get(str(opened.settings.get("advantage")), ADVANTAGES["grpo"])
    counts_U = np.array([e.good and e.reward is not None for e in episodes], dtype=bool)
    returns_U = np.array([e.reward or 0.0 for e in episodes], dtype=np.float32)
    found = estimator(returns_U, np.zeros(len(episodes), dtype=np.int32), counts_U)
    return [float(a) if counted else None for a, counted in zip(found, counts_U, strict=True)]


def as_record(episode: Episode, spans: Sequence[Span], advantage: float | None = None) -> dict[str, Any]:
    """A rollout as JSON values: what it was, what was said call by call, and what it earned."""
    rollout, attempt = episode.rollout, episode.attempt
    calls = [
        {"messages": list(c.messages), "answer": c.answer, "tools": list(c.tools), "agent": c.agent, **_finish(c.span)}
        for c in conversations(spans)
    ]
    return {
        "rollout_id": rollout.rollout_id,
        "task": rollout.input,
        "mode": rollout.mode,
        "metadata": rollout.metadata,
        "outcome": episode.outcome.value,
        "reward": episode.reward,
        "advantage": advantage,
        "error": attempt.error if attempt else None,
        "worker": attempt.worker_id if attempt else None,
        "asked_of_others": {alias: msgspec.structs.asdict(own) for alias, own in spent_of(spans).items()},
        "left_out": [msgspec.structs.asdict(one) for one in left_out_of(spans)],
        "replayed_tools": replayed_tools(spans),
        "edited": edited_messages(episode.calls),
        "calls": calls,
    }


def replayed_tools(spans: Sequence[Span]) -> list[str]:
    """The names of the tools that did not run, because their results were from a recording; one for each call."""
    return [str(span.attributes.get(OPERATION_NAME)) for span in spans if REPLAYED_FROM in span.attributes]


def _finish(span: Span) -> dict[str, Any]:
    reasons = span.attributes.get("gen_ai.response.finish_reasons")
    reason = reasons[0] if isinstance(reasons, list | tuple) and reasons else None
    return {"finish_reason": reason, "tokens": span.attributes.get("gen_ai.usage.output_tokens")}


def _lost(episode: Episode) -> Iterator[tuple[str, int, int]]:
    """By cause: tokens that calls share no longer with the history that they left, and how many such calls."""
    left = [c.info.divergence for c in episode.calls if c.info.divergence is not None and c.info.divergence.tokens_lost]
    for cause in dict.fromkeys(one.cause for one in left):
        lost = [one.tokens_lost for one in left if one.cause == cause]
        yield cause.replace("_", " "), sum(lost), len(lost)


def edited_messages(calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The messages that a fork edited, and in how many of its calls."""
    found = Counter((one["role"], one["index"]) for call in calls for one in call.info.used.get(EDITED, ()))
    return [{"role": role, "index": index, "calls": number} for (role, index), number in found.items()]


def _panel(episode: Episode, spans: Sequence[Span], wanted: ShowOptions, width: int, advantage: float | None) -> Panel:
    rollout = episode.rollout
    task = json.dumps(rollout.input, ensure_ascii=False, default=repr)
    phrases = log(spans) if wanted.log else transcript(spans, full=wanted.full)
    parts = [Text(f"task  {safe(task)}", style="dim"), phrases]
    if episode.attempt is not None and episode.attempt.error:
        parts.append(Text(safe(episode.attempt.error), style="red"))
    for alias, own in spent_of(spans).items():
        parts.append(Text(f"calls to {safe(alias)}: {own.words()}", style="dim"))
    for cause, tokens, number in _lost(episode):
        parts.append(Text(f"{tokens:,} tokens computed again: {number} × {safe(cause)}", style="dim"))
    if taken := replayed_tools(spans):
        parts.append(Text(f"results of tools from the record: {safe(', '.join(taken))}", style="dim"))
    for one in left_out_of(spans):
        parts.append(Text(f"left out of its requests: {safe(one.field)} ({safe(one.why)})", style="dim"))
    for one in edited_messages(episode.calls):
        words = f"edited by the fork: message {one['index'] + 1} ({one['role']}), calls: {one['calls']}"
        parts.append(Text(safe(words), style="yellow"))
    step = rollout.step
    ends = [_finish(s)["finish_reason"] for s in spans if "gen_ai.response.finish_reasons" in s.attributes]
    words = [
        rollout.mode.value if rollout.mode else "",
        "" if step is None else f"step {step}",
        "no reward" if episode.reward is None else f"reward {episode.reward:g}",
        "" if advantage is None else f"advantage {advantage:+.2f}",
        episode.outcome.value,
        f"ended by {ends[-1]}" if ends and ends[-1] == "length" else "",
    ]
    good = episode.good and (advantage > 0 if advantage is not None else bool(episode.reward))
    title = Text(safe(", ".join(filter(None, words))))
    subtitle = Text(safe(rollout.rollout_id))
    return Panel(Group(*parts), title=title, subtitle=subtitle, width=width, border_style="green" if good else "red")
