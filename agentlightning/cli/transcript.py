"""Transcripts of agents for people, read back from the spans of their model calls and of the messages they emitted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from agentlightning.adapter.numbered import messages_in, tools_in
from agentlightning.console import safe
from agentlightning.store.base import LightningStore
from agentlightning.types import Rollout, RolloutMode, Span
from agentlightning.types.finding import counted
from agentlightning.types.names import MESSAGE_BODY
from agentlightning.types.reward import find_final_reward

_STYLES = {"system": "dim", "user": "bold", "assistant": "cyan", "tool": "yellow"}


async def before_and_after(store: LightningStore, last_step: int) -> RenderableType | None:
    """A validation task that failed before training and succeeded after it, side by side; None if there is none."""
    rollouts = [r for r in await store.query_rollouts(limit=-1) if r.mode is RolloutMode.VAL]
    before = [r for r in rollouts if r.step == 0]
    after = {json.dumps(r.input): r for r in rollouts if r.step == last_step}
    for first in before:
        second = after.get(json.dumps(first.input))
        if second is None:
            continue
        spans = await _spans(store, first), await _spans(store, second)
        rewards = tuple(find_final_reward(s) or 0.0 for s in spans)
        if rewards[0] < rewards[1] and any("gen_ai.output.messages" in s.attributes for s in spans[0]):
            return _side_by_side(first, spans, rewards, last_step)
    return None


async def _spans(store: LightningStore, rollout: Rollout) -> Sequence[Span]:
    return (await store.query_spans(rollout.rollout_id, "latest")).items


def _side_by_side(
    rollout: Rollout, spans: tuple[Sequence[Span], ...], rewards: tuple[float, ...], last_step: int
) -> RenderableType:
    titles = ("before training", f"after {counted(last_step, 'step')}")
    panels = [
        Panel(
            log(s) or transcript(s),
            title=f"{title}: reward {reward:g}",
            width=58,
            border_style="green" if reward else "red",
        )
        for title, s, reward in zip(titles, spans, rewards, strict=True)
    ]
    return Group(Text(f"\nThe same task before and after: {json.dumps(rollout.input)}"), Columns(panels))


def transcript(spans: Sequence[Span], *, full: bool = False) -> Text:
    """The messages of an attempt's model calls in order, and what the agent emitted between them; with `full` system
    prompts and tools too, each once. Of several agents each is shown by its name.
    """
    text = Text()
    tools: set[str] = set()
    agents = {str(name) for span in spans if (name := span.attributes.get("gen_ai.agent.name")) is not None}
    for span in spans:
        given = span.attributes.get("gen_ai.tool.definitions")
        if full and isinstance(given, str) and given not in tools:
            tools.add(given)
            for tool in tools_in(given):
                text.append(f"{'tools':>9}  ", style="dim")
                text.append(f"{safe(json.dumps(tool.get('function', tool), ensure_ascii=False))}\n", style="dim")
        for key in ("gen_ai.input.messages", "gen_ai.output.messages"):
            for message in messages_in(span.attributes.get(key)):
                if full or message["role"] != "system":
                    name = span.attributes.get("gen_ai.agent.name") if len(agents) > 1 else None
                    spoke = safe(str(name)) if name and key == "gen_ai.output.messages" else safe(message["role"])
                    text.append(f"{spoke:>9}  ", style=_STYLES.get(message["role"], ""))
                    text.append(f"{_content(message)}\n")
        if (line := span.attributes.get(MESSAGE_BODY)) is not None:
            text.append(f"{'message':>9}  ", style="magenta")
            text.append(f"{safe(str(line))}\n")
    text.rstrip()
    return text


def log(spans: Sequence[Span]) -> Text:
    """The messages that an agent emitted, a line each, without its model calls."""
    lines = [span.attributes[MESSAGE_BODY] for span in spans if MESSAGE_BODY in span.attributes]
    return Text("\n".join(safe(str(line)) for line in lines))


def _content(message: dict[str, Any]) -> str:
    """The text of a message in the GenAI conventions' parts."""
    return safe(" ".join(_part(part) for part in message["parts"]).strip())


def _part(part: dict[str, Any]) -> str:
    if part["type"] == "tool_call":
        arguments = part.get("arguments")
        return f"{part.get('name', '')}({arguments if isinstance(arguments, str) else json.dumps(arguments)})"
    if part["type"] == "tool_call_response":
        return str(part.get("response", part.get("result", "")))
    return str(part.get("content", ""))
