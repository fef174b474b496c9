"""Why a request does not continue a known history, as far as its messages say. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from itertools import islice

from agentlightning.gateway.history.keys import MessageKeys
from agentlightning.gateway.history.tree import Entry, Walk, walk_to

_MOST_PROMPTS = 8
"""System prompts that a new one is compared with, the latest ones."""


def cause_of(keys: MessageKeys, root: Entry, roots: Collection[Entry], walk: Walk, seen: Collection[bytes]) -> str:
    """The cause, should the request turn out to diverge.

    root, roots: where histories with the request's tools and template arguments begin, and where all do.
    walk: how far its messages are known.
    seen: keys of all messages that the session has seen.
    """
    messages = keys.messages
    if any(m["role"] == "assistant" for m in messages[walk.turn_depth :]) and walk.turn is not None:
        return "history_edited"
    if walk.turn is not None:
        return "reasoning_stripped" if walk.turn.reasoned else "tokenizer_seam"
    others = [other for other in roots if other is not root and walk_to(other, keys).turn]
    if others:
        return "template_changed" if any(other.loose == root.loose for other in others) else "tools_changed"
    known = [keys.similar(i) in seen for i in range(len(messages))]
    answers = [k for k, m in zip(known, messages, strict=True) if m["role"] == "assistant"]
    if messages[0]["role"] == "system" and not known[0] and any(known[1:]):
        return "system_prompt_changed" if _is_edited(messages[0]["content"], roots) else "new_conversation"
    if messages[0]["role"] != "system" and any(walk_to(e, keys).turn for e in root.systems):
        return "system_prompt_changed"  # there was one
    if any(answers):
        return "history_edited" if _comes_after(known) else "compaction"
    if answers and walk.entry.depth and messages[walk.entry.depth - 1]["role"] != "system":
        return "history_edited"
    return "new_conversation"


def _is_edited(prompt: str, roots: Collection[Entry]) -> bool:
    """Whether a system prompt is a known one that was edited, and not another agent's: one that writes a title, a
    member of a team, or one that was handed over to has a prompt that says something else.
    """
    known = [entry.text for root in roots for entry in islice(reversed(root.systems), _MOST_PROMPTS)]
    return any(_alike(prompt, text) for text in known if text is not None)


def _alike(a: str, b: str) -> bool:
    """Whether one text is the other with a part changed, or with one put in. Agents of one program may share how their
    prompts end (the tools' rules, the folder): that alone does not count.
    """
    shorter, longer = sorted((len(a), len(b)))
    begin = _largest(shorter, lambda k: a[:k] == b[:k])
    both = begin + _largest(shorter - begin, lambda k: a[len(a) - k :] == b[len(b) - k :])
    return 2 * both >= longer or 2 * begin >= shorter or 10 * both >= 9 * shorter


def _largest(n: int, holds: Callable[[int], bool]) -> int:
    """The largest number up to n for which a test holds that holds for all smaller ones."""
    low = 0
    while low < n:
        middle = (low + n + 1) // 2
        low, n = (middle, n) if holds(middle) else (low, middle - 1)
    return low


def _comes_after(known: Sequence[bool]) -> bool:
    """Whether what is unknown comes after what is known (an edit) rather than in its place (a compaction)."""
    first_unknown = known.index(False) if False in known else len(known)
    return not any(known[first_unknown:])
