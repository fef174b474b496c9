"""What was said in the rollouts: sameness, repetition, length that pays, tools that are left out. Pure.

Smells of a reward that is earned otherwise than it was meant. Each is a reason to read the rollouts it names.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from agentlightning.adapter.conversations import Conversation
from agentlightning.algorithm.episode import Episode
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.in_rollouts import ids
from agentlightning.types import Call
from agentlightning.types.arrays import Int32Array, np
from agentlightning.types.finding import Finding, problem, share, warning

SAME = 0.9
"""Share of siblings that say word for word the same."""
REPEATED = 4
"""Times that a phrase comes in a row before it counts as repetition, …"""
PHRASE = 3
"""… of at least so many tokens, and of at most:"""
LONGEST_PHRASE = 40
LOOKED_AT = 128
"""Rollouts that are searched for repeated phrases."""
LENGTH_PAYS = 0.5
"""Rank correlation of length and reward among siblings."""

_UNPARSED = re.compile(r"<tool_call>|<\|tool_call\|>|<function=|\[TOOL_CALLS\]|<\|python_tag\|>")


def text_findings(evidence: Evidence) -> Iterator[Finding]:
    """All findings about the texts that the model sampled."""
    for check in (_history_kept, _same_answers, _phrases, _length, _without_tools, _unparsed, _failing_tools, _empty):
        yield from check(evidence)


def response_bytes(episode: Episode) -> bytes:
    """All tokens sampled in a rollout as bytes, to compare rollouts with each other."""
    return b"|".join(c.response_ids.tobytes() for c in episode.calls)


def sameness(groups: Sequence[Sequence[Episode]]) -> float:
    """Share of rollouts that say word for word what an earlier sibling said."""
    siblings = sum(len(group) - 1 for group in groups)
    return sum(len(group) - len({response_bytes(e) for e in group}) for group in groups) / siblings if siblings else 0.0


def repeats(ids_R: Int32Array) -> bool:
    """Whether the text repeats some phrase `REPEATED` times in a row."""
    for size in range(PHRASE, min(LONGEST_PHRASE, len(ids_R) // REPEATED) + 1):
        same = ids_R[size:] == ids_R[:-size]
        run, longest = 0, 0
        for equal in same.tolist():
            run = run + 1 if equal else 0
            longest = max(longest, run)
        if longest >= size * (REPEATED - 1):
            return True
    return False


def length_pays(groups: Sequence[Sequence[Episode]]) -> float | None:
    """Mean rank correlation between what a rollout sampled and what it earned, over groups where both differ."""
    found = []
    for group in groups:
        lengths = np.array([e.sampled_tokens for e in group], dtype=np.float64)
        rewards = np.array([e.reward for e in group], dtype=np.float64)
        if np.ptp(lengths) > 0 and np.ptp(rewards) > 0:
            found.append(float(np.corrcoef(_ranks(lengths), _ranks(rewards))[0, 1]))
    return statistics.mean(found) if len(found) >= 4 else None


def _ranks(values: np.ndarray) -> np.ndarray:
    """Mean ranks for ties (Spearman's correlation is Pearson's of these)."""
    order = np.unique(values, return_inverse=True)[1]
    counts = np.bincount(order)
    return (np.cumsum(counts) - (counts - 1) / 2)[order]


_COOL = "Ask for temperature=1.0, in the agent's request too, and without a fixed seed."
_SETTLED = (
    "The model has settled, although it was sampled at temperature 1: set entropy_coef=0.01 and four times the "
    "tasks_per_step, and begin at an earlier checkpoint if there is one from before. If the agent's request fixes a "
    "seed, leave it out."
)


def _same_answers(evidence: Evidence) -> Iterator[Finding]:
    groups = [group for group in evidence.groups if any(e.calls for e in group)]
    same = sameness(groups)
    if len(groups) >= 4 and same > SAME and not evidence.solved and not _stopped_at_once(evidence):
        temperatures = sorted({c.info.temperature for group in groups for e in group for c in e.calls})
        if temperatures == [0.0]:
            yield problem(
                "greedy_sampling",
                "Rollouts are sampled at temperature 0, so siblings say the same, and there is nothing to compare.",
                "Set temperature=1.0, in the settings of the training and not only in the agent's request.",
                share=same,
            )
            return
        yield problem(
            "same_answers",
            f"{same:.0%} of the rollouts say word for word what a sibling said, so there is nothing to compare.",
            _SETTLED if min(temperatures, default=0.0) >= 1.0 else _COOL,
            share=same,
            temperatures=temperatures,
        )


def _history_kept(evidence: Evidence) -> Iterator[Finding]:
    """First prompts that hold an answer of an earlier rollout, and become longer by it."""
    for unit, look in (("messages", _kept_texts), ("tokens", _kept_tokens)):
        kept, lengths = look(evidence)
        if len(kept) >= max(1.0, 0.2 * len(lengths)):
            yield warning(
                "history_kept",
                f"{share(len(kept), len(lengths))} rollouts begin with answers of earlier rollouts in their prompt, "
                f"which has grown from {min(lengths)} to {max(lengths)} {unit}.",
                "Begin each rollout with an empty history: make the list of messages (or the memory, or the agent "
                "object of a framework) inside the function, not once at the top of the file.",
                rollouts=ids(kept),
            )
            return


def _kept_texts(evidence: Evidence) -> tuple[list[Episode], list[int]]:
    """The rollouts whose first prompt holds another one's answer as a message, and how many messages all begin with."""
    begins = [(e, talks[0]) for e in evidence.episodes if (talks := evidence.talks.get(e.rollout.rollout_id))]
    lengths = [len(talk.messages) for _, talk in begins]
    if len(begins) < 4 or max(lengths) < min(lengths) + 2:
        return [], lengths
    answers: set[str] = set()
    kept: list[Episode] = []
    for episode, talk in begins:
        contents = {str(m.get("content")) for m in talk.messages if m.get("role") == "assistant" and m.get("content")}
        if contents & answers:
            kept.append(episode)
        answers |= {_content(t) for t in evidence.talks[episode.rollout.rollout_id]}
    return kept, lengths


_WINDOW = 8
"""So many tokens of an answer tell whose it is."""


def _kept_tokens(evidence: Evidence) -> tuple[list[Episode], list[int]]:
    """The same by tokens, of which an answer's first ones are looked for; also where no text was read.

    What its own rollout had been given beforehand, such as an example of the prompt, is nobody's answer.
    """
    episodes = [e for e in evidence.episodes if e.calls][-4 * LOOKED_AT :]
    lengths = [len(e.calls[0].prompt_ids) for e in episodes]
    if len(episodes) < 4 or max(lengths) < min(lengths) + _WINDOW:
        return [], lengths
    begins = [(e, _windows(e.calls[0].prompt_ids)) for e in episodes]
    answers = [_windows(call.response_ids[:_WINDOW]) for e, _ in begins for call in e.calls]
    owners = [own for e, own in begins for _ in e.calls]
    new = [answer for answer, own in zip(answers, owners, strict=True) if not np.isin(answer, own).any()]
    known = np.concatenate([np.zeros(0, dtype=np.uint64), *new])
    return [e for e, own in begins if np.isin(own, known).any()], lengths


def _windows(ids_S: np.ndarray) -> np.ndarray:
    """A hash of each run of `_WINDOW` tokens."""
    if len(ids_S) < _WINDOW:
        return np.zeros(0, dtype=np.uint64)
    runs = np.lib.stride_tricks.sliding_window_view(ids_S.astype(np.uint64), _WINDOW)
    powers = np.uint64(6364136223846793005) ** np.arange(_WINDOW, dtype=np.uint64)
    return (runs * powers).sum(axis=1, dtype=np.uint64)


def repeating(episodes: Sequence[Episode]) -> tuple[list[Episode], list[Episode]]:
    """The last rollouts that repeat a phrase over and over, and those that were looked at."""
    looked = [e for e in episodes if e.calls][-LOOKED_AT:]
    return [e for e in looked if any(repeats(c.response_ids) for c in e.calls if c.info.trained)], looked


def _phrases(evidence: Evidence) -> Iterator[Finding]:
    found, with_calls = repeating(evidence.episodes)
    if found and len(found) >= 0.2 * len(with_calls):
        yield warning(
            "repeated_phrases",
            f"{share(len(found), len(with_calls))} rollouts repeat a phrase over and over.",
            "Read one. If it earns a reward, the reward pays for it: change it. If not, lower max_tokens or set "
            "overlong_tokens; for a base model check that it knows when to stop.",
            rollouts=ids(found),
        )


def _length(evidence: Evidence) -> Iterator[Finding]:
    pays = length_pays(evidence.groups)
    early = [e.sampled_tokens for e in evidence.early if e.calls]
    late = [e.sampled_tokens for e in evidence.episodes if e.calls]
    if pays is None or pays < LENGTH_PAYS or not early or not late:
        return
    before, now = statistics.mean(early), statistics.mean(late)
    if before > 0 and now > 2 * before:
        yield warning(
            "length_pays",
            f"Longer answers earn more (rank correlation {pays:.2f} among siblings), and rollouts have grown from "
            f"{before:.0f} to {now:.0f} sampled tokens.",
            "Read a long one: is it better, or only longer? If longer, let the reward look at the result alone, and "
            "set "
            "overlong_tokens.",
            correlation=pays,
            tokens_before=before,
            tokens_now=now,
        )


def paid_without_tools(evidence: Evidence, episodes: Sequence[Episode]) -> tuple[list[Episode], list[Episode]]:
    """Rollouts with the highest reward that used none of the tools they were offered, and all such that had tools."""
    offered = {r for r, talks in evidence.talks.items() if any(talk.tools for talk in talks)}
    if not offered or evidence.spread == 0:
        return [], []
    top = max(evidence.rewards)
    paid = [e for e in episodes if e.rollout.rollout_id in offered and e.reward == top]
    return [e for e in paid if not any(_tool_calls(t) for t in evidence.talks[e.rollout.rollout_id])], paid


def _without_tools(evidence: Evidence) -> Iterator[Finding]:
    """Rollouts that earn the highest reward without any of the tools, where the first ones used them."""
    before, paid_before = paid_without_tools(evidence, evidence.early)
    now, paid_now = paid_without_tools(evidence, evidence.episodes)
    if len(paid_now) < 8 or len(now) < 0.5 * len(paid_now):
        return
    if paid_before and len(before) >= 0.25 * len(paid_before):
        return  # the tools were never needed
    yield warning(
        "reward_without_tools",
        f"{share(len(now), len(paid_now))} rollouts with the highest reward used none of the tools they were offered"
        f"{', and the first ones of the run did' if paid_before else ''}.",
        "Read one: does the answer follow from work that was done, or was it guessed, or found in the prompt? Let the "
        "reward look at how it was reached.",
        rollouts=ids(now),
    )


def _tool_calls(talk: Conversation) -> Sequence[Mapping[str, Any]]:
    return (talk.answer or {}).get("tool_calls") or ()


def _content(talk: Conversation) -> str:
    content = (talk.answer or {}).get("content")
    return content if isinstance(content, str) else ""


def _unparsed(evidence: Evidence) -> Iterator[Finding]:
    with_tools = [(r, talk) for r, talks in evidence.talks.items() for talk in talks if talk.tools and talk.answer]
    found = [(r, talk) for r, talk in with_tools if not _tool_calls(talk) and _looks_like_a_call(talk)]
    if found and len(found) >= 0.1 * len(with_tools):
        yield warning(
            "tool_calls_unparsed",
            f"{share(len(found), len(with_tools))} answers hold a tool call that could not be read, so the agent saw "
            f"text: {_content(found[-1][1])[:120]!r}",
            "If calls are cut off, raise max_tokens. If they are whole, the renderer does not know the model's format: "
            "set renderer=…; a small model may need examples of calls in the prompt, or tool_choice='required'.",
            rollouts=[r for r, _ in found[-3:]],
        )


def _looks_like_a_call(talk: Conversation) -> bool:
    text = _content(talk)
    if _UNPARSED.search(text):
        return True
    names = [str(_of(tool, "function").get("name") or _of({"t": tool}, "t").get("name") or "") for tool in talk.tools]
    return bool(re.search(r'"(arguments|parameters)"\s*:', text)) and not set(text.split('"')[1:-1]).isdisjoint(
        filter(None, names)
    )


def _of(value: Any, name: str) -> Mapping[str, Any]:
    found = value.get(name) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _failing_tools(evidence: Evidence) -> Iterator[Finding]:
    """Tools whose results are errors, as far as their results say so."""
    results = [
        str(message.get("content", ""))
        for talks in evidence.talks.values()
        for talk in talks[-1:]
        for message in talk.messages
        if message.get("role") == "tool"
    ]
    errors = [text for text in results if re.match(r"\W*(error|traceback|exception)\b", text, re.IGNORECASE)]
    if len(errors) >= 4 and len(errors) >= 0.5 * len(results):
        yield warning(
            "tools_fail",
            f"{share(len(errors), len(results))} tool results are errors, such as {errors[-1].strip()[:120]!r}.",
            "Try the tool by hand with the arguments of a rollout (agl show). If the model calls it wrongly, say in "
            "the "
            "tool's description what it takes.",
            results=len(results),
        )


def _stopped_at_once(evidence: Evidence) -> list[Call]:
    """The calls whose answers a stop sequence of their own request ended as they began, if they are many."""
    calls = [c for e in evidence.episodes for c in e.calls if c.info.trained]
    stopped = [c for c in calls if c.info.finish_reason == "stop" and c.info.asked.get("stop")]
    at_once = [c for c in stopped if len(c.response_ids) == 1]
    return at_once if len(at_once) >= max(8, 0.3 * len(calls)) else []


def _empty(evidence: Evidence) -> Iterator[Finding]:
    calls = [c for e in evidence.episodes for c in e.calls if c.info.trained]
    if at_once := _stopped_at_once(evidence):
        yield (problem if len(at_once) >= SAME * len(calls) else warning)(
            "empty_answers",
            f"{share(len(at_once), len(calls))} answers end at their first token, in requests with "
            f"stop={sorted({s for c in at_once for s in c.info.asked['stop']})[:6]!r}: they are empty.",
            "Leave stop out of the request, or give what no answer begins with.",
            answers=len(calls),
        )
        return
    answers = [talk for talks in evidence.talks.values() for talk in talks if talk.answer]
    empty = [talk for talk in answers if not _content(talk).strip() and not _tool_calls(talk) and not _reasoned(talk)]
    if len(answers) >= 8 and len(empty) >= 0.3 * len(answers):
        yield warning(
            "empty_answers",
            f"{share(len(empty), len(answers))} answers of the model are empty.",
            "Look at the prompt in a rollout (agl show --full): does it end where the assistant speaks? An answer that "
            "begins with one of the request's stop sequences is empty, too. A model that reasons may need a larger "
            "max_tokens.",
            answers=len(answers),
        )


def _reasoned(talk: Conversation) -> bool:
    return bool(json.dumps((talk.answer or {}).get("reasoning_content") or "").strip('"'))
