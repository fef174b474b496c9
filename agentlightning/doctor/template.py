"""Template drift: prompts that are not what the model's own chat template makes of the messages, and why. Pure.

A model that reads another format than it was taught says worse things from the first step on, and a model that was
trained on such a format says worse things wherever it is served with its own. Looked at are prompts that nothing came
before: what follows them is continued token by token, whatever a template would make of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.adapter.conversations import Conversation
from agentlightning.doctor.breaks import CLOCK, Decode, common
from agentlightning.doctor.evidence import Evidence
from agentlightning.types.arrays import np
from agentlightning.types.finding import Finding, share, warning

Template = Callable[[Sequence[Mapping[str, Any]], Sequence[Any]], Sequence[int] | None]
"""(messages, tools) → the prompt's tokens by the model's own chat template; None where it cannot express them."""

_SHOWN = 24
"""Tokens of either side that are shown."""
_MOST = 32
"""Prompts that are compared."""
_ROLES = ("system", "user")

FIXES = {
    "date": "The chat template writes the date, so that prompts differ from day to day. Send a system prompt of your "
    "own, or take the date out of chat_template.jinja.",
    "system_prompt": "One of the two adds a system prompt that nobody sent. Send one yourself, or take the default "
    "out of chat_template.jinja.",
    "tools": "The tools are written in another form than the model was taught. Leave renderer out, or name the "
    "one that fits the model.",
    "renderer": "Leave renderer out (also in the model's agentlightning.json): then the one that agrees with the "
    "model's chat template is found, or the template itself is taken.",
    "template": "Compare chat_template.jinja with that of the model it came from; renderer='default' takes the "
    "template as it is.",
}
"""What to do, by cause."""
_WORDS = {
    "date": "the template writes a date",
    "system_prompt": "a system prompt nobody sent",
    "tools": "the tools' form",
    "renderer": "the renderer that was named",
    "template": "the template was changed, or is not the one the renderer is for",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One prompt that the chat template would have written otherwise."""

    rollout_id: str
    cause: str
    """A key of `FIXES`."""
    position: int
    was: str
    """How the prompt goes on from the first token that differs."""
    wanted: str
    """How the template goes on."""


def template_findings(evidence: Evidence, template: Template | None, decode: Decode | None) -> Iterator[Finding]:
    """One finding where most of the prompts drift."""
    if template is None or decode is None:
        return
    looked, found = find_drift(evidence, template, decode)
    if 2 * len(found) <= looked:
        return
    causes = [one.cause for one in found]
    cause = max(set(causes), key=causes.count)
    example = next(one for one in found if one.cause == cause)
    yield warning(
        "template_drift",
        f"{share(len(found), looked)} prompts are not what the model's own chat template makes of the messages "
        f"({_WORDS[cause]}): they go on with {example.was[:40]!r}, the template with {example.wanted[:40]!r}.",
        FIXES[cause],
        cause=cause,
        rollouts=[one.rollout_id for one in found][:3],
        position=example.position,
        was=example.was,
        wanted=example.wanted,
    )


def find_drift(evidence: Evidence, template: Template, decode: Decode) -> tuple[int, list[Drift]]:
    """Compares prompts with their template: returns how many were compared, and those that drift."""
    prompts = {c.info.call_id: c.prompt_ids for e in evidence.episodes for c in e.calls if c.info.trained}
    looked, found = 0, list[Drift]()
    for rollout_id, talks in evidence.talks.items():
        for talk in talks:
            ids = prompts.get(talk.call_id or "")
            if ids is None or not len(ids) or looked >= _MOST or not _plain(talk):
                continue
            wanted = template(talk.messages, talk.tools)
            if wanted is None:
                continue
            looked += 1
            if list(wanted) != ids.tolist():
                found.append(_drift(rollout_id, ids, np.array(wanted, dtype=np.int32), talk, decode, evidence.settings))
    return looked, found


def _plain(talk: Conversation) -> bool:
    """Whether it is a prompt of system and user messages in plain text, which nothing came before."""
    texts = [m.get("role") in _ROLES and isinstance(m.get("content"), str) for m in talk.messages]
    return talk.parent_call_id is None and bool(texts) and all(texts)


def _drift(
    rollout_id: str, ids: Any, wanted: Any, talk: Conversation, decode: Decode, settings: Mapping[str, Any]
) -> Drift:
    at = common(ids, wanted)
    was, other = (decode(side[at : at + _SHOWN].tolist()) for side in (ids, wanted))
    whole = [decode(side.tolist()) for side in (ids, wanted)]
    return Drift(
        rollout_id=rollout_id,
        cause=_cause(whole, (was, other), talk, settings),
        position=at,
        was=was,
        wanted=other,
    )


def _cause(whole: Sequence[str], sides: tuple[str, str], talk: Conversation, settings: Mapping[str, Any]) -> str:
    if _undated(whole[0]) == _undated(whole[1]) or _writes_a_date(sides[1], talk):
        return "date"
    named = [len(re.findall(r"\bsystem\b", text.split(_first_words(talk), 1)[0])) for text in whole]
    if not any(m["role"] == "system" for m in talk.messages) and named[0] != named[1] and not talk.tools:
        return "system_prompt"
    if settings.get("renderer") not in (None, "default"):
        return "renderer"
    if talk.tools and any('"name"' in side or "function" in side or "tool" in side for side in sides):
        return "tools"
    return "template"


def _first_words(talk: Conversation) -> str:
    return next((m["content"] for m in talk.messages if m["role"] == "user" and m["content"]), "\0")


_MONTHS = re.compile(r"\b\d{1,2} (jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)\w* \d{4}\b", re.IGNORECASE)


def _writes_a_date(text: str, talk: Conversation) -> bool:
    """Whether there is a date in what the template wrote that is in none of the messages."""
    sent = "\n".join(m["content"] for m in talk.messages)
    return any(found.group() not in sent for kind in (CLOCK, _MONTHS) for found in kind.finditer(text))


def _undated(text: str) -> str:
    """The text without dates and times."""
    return CLOCK.sub("", _MONTHS.sub("", text))
