"""Prefix breaks: where a call did not continue the tokens of the call before it, what differs first, and why. Pure.

A history that breaks is sampled and trained a second time from the break on. The gateway says of each call where it
left a known history; here the two sides are laid beside each other as text, and the cause is told from what differs.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agentlightning.algorithm.episode import Episode
from agentlightning.doctor.evidence import Evidence
from agentlightning.types.arrays import Int32Array, np
from agentlightning.types.call import Call
from agentlightning.types.finding import Finding, counted, warning

Decode = Callable[[Sequence[int]], str]
"""Token ids → text."""

BEFORE, AFTER = 12, 24
"""Tokens before and after the first difference that are shown."""
WORTH_A_WORD = 0.05
"""Share of all prompt tokens that must be lost."""

ADVICE = {
    "clock": "Take the clock, date, id or hash out of the system prompt, or put it into the last user message: every "
    "token after it is computed again.",
    "tool_json": "Send tool calls back as they came: the client rewrites their JSON (other spaces, order or escapes).",
    "reasoning_stripped": "The reasoning of earlier answers is left out. Send reasoning_content back with each answer "
    "if "
    "the model's template keeps it; if the template itself drops it, this is how the model is meant to be used.",
    "system_prompt_changed": "Keep the system prompt the same within a rollout; put what changes into the last "
    "message.",
    "tools_changed": "Offer the same tools, in the same order, in every call of a rollout.",
    "template_changed": "Give the chat template the same arguments (chat_template_kwargs, effort, thinking on or "
    "off) in every call of a rollout.",
    "history_edited": "Only add messages: an earlier one was changed, or left out.",
    "compaction": "The history was summarised. That costs one break each time: do it less often, or raise max_context.",
    "sub_agent": "A conversation of its own, as a sub-agent has: nothing to mend.",
    "tokenizer_seam": "The same text was tokenised otherwise. The gateway could not bridge this template: set "
    "renderer=… "
    "to one that knows the model.",
    "context_cleared": "The agent asked for old tool results or thoughts to be cleared (context_management). Clear "
    "more at a time, and less often.",
    "cut_to_fit": "The prompt was cut to fit the context: raise max_context, or let the agent shorten its history "
    "itself.",
}
"""What to change, by cause. The causes that are told apart, in the order in which they are looked for."""

CLOCK = re.compile(
    r"\d{1,2}:\d{2}|\d{4}-\d{2}-\d{2}|\b\d{9,}\b|[0-9a-f]{8}-[0-9a-f]{0,4}|\b[0-9a-f]{12,}\b"
    r"|\b(mon|tues|wednes|thurs|fri|satur|sun)day\b",
    re.IGNORECASE,
)
"""A date, a time or a random id."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Break:
    """One call that left the history of an earlier one."""

    rollout_id: str
    call_id: str
    after_call_id: str
    """The call whose tokens it shares the most of."""
    cause: str
    """A key of `ADVICE`."""
    position: int
    """Index of the first token that differs."""
    tokens_lost: int
    """Tokens of the known history after it."""
    before: str
    """The text that both have, up to the break."""
    was: str
    """How the history went on; empty without a tokenizer."""
    now: str
    """How the new prompt goes on."""

    @property
    def advice(self) -> str:
        return ADVICE[self.cause]


def find_breaks(episodes: Sequence[Episode], decode: Decode | None = None) -> list[Break]:
    """All breaks in the rollouts' last attempts. Without `decode` causes are the gateway's and texts are empty."""
    return [one for e in episodes if any(map(_is_broken, e.calls)) for one in _breaks(e.calls, decode)]


def _is_broken(call: Call) -> bool:
    return call.info.divergence is not None and call.info.divergence.cause != "new_conversation"


def _breaks(calls: Sequence[Call], decode: Decode | None) -> Iterator[Break]:
    """The breaks among an attempt's calls."""
    prompts, earlier = defaultdict[str, _Beginnings](_Beginnings), defaultdict[str, _Beginnings](_Beginnings)
    for number, call in enumerate(calls):
        prompts[call.info.policy].add(number, call.prompt_ids)
    for number, call in enumerate(calls):
        policy = call.info.policy
        if _is_broken(call) and (nearest := earlier[policy].nearest(call.prompt_ids)) is not None:
            left = calls[nearest]
            goes_on = max(prompts[policy].that_begin_with(_whole(left)), default=0) > number
            yield _explain(call, left, decode, apart=goes_on or _of_two_agents(call, left))
        earlier[policy].add(number, _whole(call))


def _of_two_agents(call: Call, left: Call) -> bool:
    ours, theirs = call.info.agent, left.info.agent
    return ours is not None and theirs is not None and ours != theirs


class _Beginnings:
    """Numbers of calls by tokens of theirs, in the tokens' order: those that begin alike stand side by side."""

    def __init__(self) -> None:
        self._tokens: list[bytes] = []
        self._numbers: list[int] = []

    def add(self, number: int, ids: Int32Array) -> None:
        tokens = ids.tobytes()
        at = bisect_left(self._tokens, tokens)
        self._tokens.insert(at, tokens)
        self._numbers.insert(at, number)

    def that_begin_with(self, ids: Int32Array) -> list[int]:
        beginning = ids.tobytes()
        low = bisect_left(self._tokens, beginning)
        return self._numbers[low : bisect_right(self._tokens, beginning, low, key=lambda one: one[: len(beginning)])]

    def nearest(self, ids: Int32Array) -> int | None:
        """The call with the longest common beginning, and of several the earliest."""
        at = bisect_left(self._tokens, ids.tobytes())
        neighbours = [np.frombuffer(one, ids.dtype) for one in self._tokens[max(0, at - 1) : at + 1]]
        return min(self.that_begin_with(ids[: max(common(ids, one) for one in neighbours)])) if neighbours else None


def lost_by_cause(breaks: Sequence[Break]) -> dict[str, list[Break]]:
    """The breaks of each cause, the one that costs most first."""
    found: defaultdict[str, list[Break]] = defaultdict(list)
    for one in breaks:
        found[one.cause].append(one)
    return dict(sorted(found.items(), key=lambda item: -sum(b.tokens_lost for b in item[1])))


def lost_tokens(evidence: Evidence) -> dict[str, Any]:
    """What breaks cost, whatever their causes: how many there are, and which share of the prompt tokens is lost."""
    breaks = [one for one in find_breaks(evidence.episodes) if one.cause != "sub_agent"]
    total = sum(len(c.prompt_ids) for e in evidence.episodes for c in e.calls)
    lost = sum(one.tokens_lost for one in breaks)
    per_step = lost / _steps(evidence)
    return {
        "prefix_breaks": len(breaks),
        "prompt_tokens_lost": lost / total if total else None,
        "tokens_lost_per_step": per_step if breaks else None,
        "seconds_lost_per_step": _seconds(evidence, per_step) if breaks else None,
    }


def _steps(evidence: Evidence) -> int:
    """How many steps the rollouts that were read belong to."""
    return max(1, len({e.rollout.step for e in evidence.episodes}))


def break_findings(evidence: Evidence, decode: Decode | None = None) -> Iterator[Finding]:
    """One finding for each cause that costs something."""
    calls = [c for e in evidence.episodes for c in e.calls]
    total = sum(len(c.prompt_ids) for c in calls)
    steps = _steps(evidence)
    for cause, breaks in lost_by_cause(find_breaks(evidence.episodes, decode)).items():
        lost = sum(one.tokens_lost for one in breaks)
        if lost < WORTH_A_WORD * total or cause == "sub_agent":
            continue
        example = max(breaks, key=lambda one: one.tokens_lost)
        shown = f" First difference: {example.was[:40]!r} became {example.now[:40]!r}." if example.now else ""
        yield warning(
            f"prefix_break_{cause}",
            f"{counted(len(breaks), 'call')} did not continue the tokens before ({_WORDS[cause]}), which costs "
            f"{lost / steps:,.0f} "
            f"tokens per step ({lost / total:.0%} of all prompts).{shown}",
            ADVICE[cause],
            breaks=len(breaks),
            tokens_lost_per_step=lost / steps,
            seconds_lost_per_step=_seconds(evidence, lost / steps),
            rollouts=sorted({one.rollout_id for one in breaks})[:3],
            position=example.position,
            before=example.before,
            was=example.was,
            now=example.now,
        )


_WORDS = {
    "clock": "a clock, an id or a hash in the prompt",
    "tool_json": "tool calls rewritten",
    "reasoning_stripped": "reasoning left out",
    "system_prompt_changed": "another system prompt",
    "tools_changed": "other tools",
    "template_changed": "other arguments of the chat template",
    "history_edited": "an earlier message changed",
    "compaction": "history summarised",
    "sub_agent": "a conversation of its own",
    "tokenizer_seam": "the same text in other tokens",
    "context_cleared": "cleared by context_management",
    "cut_to_fit": "cut to fit the context",
}


def _seconds(evidence: Evidence, tokens: float) -> float | None:
    """What as many tokens cost the learner; None where nobody measured it."""
    computed, seconds = sum(evidence.series("tree_tokens")), sum(evidence.series("learning_seconds"))
    return round(tokens * seconds / computed, 3) if computed else None


def _whole(call: Call) -> Int32Array:
    return np.concatenate((call.prompt_ids, call.response_ids))


def common(a: Int32Array, b: Int32Array) -> int:
    """Length of the common beginning."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(a[:n] != b[:n])
    return int(differ[0]) if len(differ) else n


def _explain(call: Call, left: Call, decode: Decode | None, *, apart: bool) -> Break:
    assert call.info.divergence is not None
    whole = _whole(left)
    at = common(whole, call.prompt_ids)
    was, now, before = "", "", ""
    cause = _KNOWN.get(call.info.divergence.cause, "history_edited")
    if decode is not None:
        before = decode(whole[max(0, at - BEFORE) : at].tolist())
        was, now = (decode(ids[at : at + AFTER].tolist()) for ids in (whole, call.prompt_ids))
        around = decode(whole[max(0, at - 3 * BEFORE) : at + 3 * AFTER].tolist())
        other = decode(call.prompt_ids[max(0, at - 3 * BEFORE) : at + 3 * AFTER].tolist())
        cause = _cause(cause, before, was, now, (around, other))
    if apart and cause in _PERHAPS_APART:
        cause = "sub_agent"
    return Break(
        rollout_id=call.info.rollout_id,
        call_id=call.info.call_id,
        after_call_id=left.info.call_id,
        cause=cause,
        position=at,
        tokens_lost=max(call.info.divergence.tokens_lost, min(len(whole), len(call.prompt_ids)) - at),
        before=before,
        was=was,
        now=now,
    )


_KNOWN = {name: name for name in ADVICE}
_PERHAPS_APART = ("system_prompt_changed", "history_edited", "compaction", "tools_changed")
"""What a conversation of its own looks like beside the one that it shares its beginning with."""


def _cause(known: str, before: str, was: str, now: str, around: tuple[str, str]) -> str:
    """What the texts say beyond what the gateway could know."""
    if known in ("tools_changed", "template_changed", "context_cleared", "cut_to_fit", "compaction"):
        return known
    if was.startswith("<think>") or (known == "reasoning_stripped"):
        return "reasoning_stripped"
    width = min(len(was), len(now))
    if was[:width] == now[:width] and width:
        return "tokenizer_seam"
    if differ_by_clock(before, was, now) or (known == "system_prompt_changed" and _differ_in_one_word(*around)):
        return "clock"
    if _same_json(*around):
        return "tool_json"
    return known


def differ_by_clock(before: str, was: str, now: str) -> bool:
    """Whether two texts that go on differently after `before` differ in a date, a time or a random id."""
    tail = before[-24:]
    return all(CLOCK.search(_word(tail + text, len(tail))) for text in (was, now))


_VOLATILE = re.compile(r"\S*\d\S*")
"""A word with a digit in it: a version's hash, a number of a build, an id."""


def _differ_in_one_word(was: str, now: str) -> bool:
    """Whether two texts around a break are the same but for one word that has a digit in it."""
    first, second = (text.split() for text in (was, now))
    words = list(zip(first, second, strict=False))
    other = [(a, b) for a, b in words[1:-1] if a != b]  # the first and the last may be cut anywhere
    return len(words) > 4 and len(other) == 1 and all(_VOLATILE.fullmatch(word) for word in other[0])


def _word(text: str, at: int) -> str:
    """What stands around index `at`, up to the next line's end: a date or an id may have begun before it."""
    return text[max(0, at - 24) : at + 24].splitlines()[0] if text else ""


def _same_json(was: str, now: str) -> bool:
    """Whether the first JSON object that both texts hold means the same and is written otherwise."""
    first, second = _objects(was), _objects(now)
    return any(a[1] == b[1] and a[0] != b[0] for a in first for b in second)


def _objects(text: str) -> list[tuple[str, str]]:
    """JSON objects in a text, as written and in one canonical form."""
    found: list[tuple[str, str]] = []
    decoder = json.JSONDecoder()
    at = text.find("{")
    while at >= 0 and len(found) < 8:
        try:
            value, end = decoder.raw_decode(text, at)
            found.append((text[at:end], json.dumps(value, sort_keys=True)))
            at = text.find("{", end)
        except ValueError:
            at = text.find("{", at + 1)
    return found
