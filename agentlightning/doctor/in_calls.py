"""What the model calls of a run say beyond their texts: failures that nobody was told of, attempts that were made
again, prompts that siblings do not share, and sampling settings that were changed. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from agentlightning.algorithm.episode import Episode
from agentlightning.algorithm.rollout_verdicts import BUSY_FIX, is_busy
from agentlightning.doctor.breaks import WORTH_A_WORD, Decode, common, differ_by_clock
from agentlightning.doctor.evidence import Evidence
from agentlightning.doctor.in_rollouts import MANY, MOST, ids
from agentlightning.types import Span
from agentlightning.types.call import MEDIA, Call, left_out_of
from agentlightning.types.finding import Finding, note, problem, share, warning
from agentlightning.types.names import CALL_ID

UNSEEN = "The model answers without having seen them: write what they show as text, or take tasks that need none."
_NAMED = 4
"""Parts of requests that a finding names."""
_SHOWN = 24
"""Tokens of a prompt that are looked at around the first difference."""


def call_findings(evidence: Evidence, decode: Decode | None = None) -> Iterator[Finding]:
    """All findings about model calls. `decode` turns token ids into text."""
    yield from _failed_calls(evidence)
    yield from _repeated(evidence)
    yield from _same_prompt(evidence)
    yield from _apart(evidence, decode)
    yield from _temperature(evidence)
    yield from _left_out(evidence)


def _failed_calls(evidence: Evidence) -> Iterator[Finding]:
    """Calls that failed in rollouts that ended well: the agent was rated without them, or its client asked again."""
    looked = [e for e in evidence.episodes if e.good and e.rollout.rollout_id in evidence.spans]
    failures = [(e, *_failures(evidence.spans[e.rollout.rollout_id])) for e in looked]
    without = [e for e, given_up, _ in failures if given_up]
    again = [e for e, _, all_of_them in failures if all_of_them]
    if without and len(without) >= MANY * len(looked) / 2:
        text, count = Counter(line for _, given_up, _ in failures for line in given_up).most_common(1)[0]
        yield (problem if len(without) >= MOST * len(looked) else warning)(
            "calls_fail_unseen",
            f"In {share(len(without), len(looked))} rollouts a model call failed, and the agent went on without its "
            f"answer and was rated. Most common ({count}×): {text}",
            (f"{BUSY_FIX} " if is_busy(text) else "")
            + "Let the agent raise where a call fails: then the rollout is left out or repeated. Now its "
            "reward measures the failure and not the model.",
            rollouts=ids(without),
        )
    elif again and len(again) >= MANY * len(looked):
        text, count = Counter(line for *_, lines in failures for line in lines).most_common(1)[0]
        yield warning(
            "calls_retried",
            f"In {share(len(again), len(looked))} rollouts a model call failed and was made again, which takes time. "
            f"Most common ({count}×): {text}",
            BUSY_FIX if is_busy(text) else "Mend what the message names.",
            rollouts=ids(again),
        )


def _failures(spans: Sequence[Span]) -> tuple[list[str], list[str]]:
    """Why calls failed: those whose model gave no answer afterwards, and all. Refusals are reported elsewhere."""
    calls = [s for s in spans if CALL_ID in s.attributes and s.attributes.get("error.type") != "refused"]
    calls.sort(key=lambda span: span.start_time or 0.0)
    given_up, every = list[str](), list[str]()
    for n, span in enumerate(calls):
        if span.status.status_code != "ERROR":
            continue
        line = _first_line(span.status.description or "")[:200]
        every.append(line)
        if not any(_model(c) == _model(span) and c.status.status_code != "ERROR" for c in calls[n + 1 :]):
            given_up.append(line)
    return given_up, every


def _model(span: Span) -> Any:
    return span.attributes.get("gen_ai.request.model")


def _repeated(evidence: Evidence) -> Iterator[Finding]:
    """Attempts that failed and were made again, which only costs time where the last one succeeds."""
    begun = [e for e in evidence.episodes if e.attempt is not None]
    again = [e for e in begun if e.attempt is not None and e.attempt.sequence_id > 1]
    if not again or len(again) < MANY * len(begun):
        return
    lines = [_first_line(error) for r in again for error in evidence.earlier_errors.get(r.rollout.rollout_id, ())]
    text, count = Counter(lines).most_common(1)[0] if lines else ("no message", len(again))
    attempts = sum(e.attempt.sequence_id for e in begun if e.attempt is not None)
    yield warning(
        "attempts_repeated",
        f"{share(len(again), len(begun))} rollouts were tried more than once: {attempts - len(begun)} of {attempts} "
        f"attempts failed. Most common ({count}×): {text}",
        BUSY_FIX
        if any(map(is_busy, lines))
        else "Mend what the message names: each attempt that is made again costs a rollout's time.",
        attempts=attempts,
        rollouts=ids(again),
    )


def _first_line(error: str) -> str:
    return (error.strip().splitlines() or ["no message"])[0][:300]


def _first_prompts(group: Sequence[Episode]) -> list[Call]:
    """The first trained call of each."""
    found = (next((c for c in e.calls if c.info.trained), None) for e in group)
    return [call for call in found if call is not None and len(call.prompt_ids)]


def _same_prompt(evidence: Evidence) -> Iterator[Finding]:
    """Every rollout began with the same prompt: there is one task, and its answer can be learned by heart."""
    episodes = [e for e in evidence.episodes if e.good]
    prompts = _first_prompts(episodes)
    tasks = {repr(e.rollout.input) for e in episodes}
    if len(prompts) < 8 or len(tasks) > 1 or len({c.prompt_ids.tobytes() for c in prompts}) > 1:
        return
    yield warning(
        "one_task",
        f"All {len(prompts)} rollouts had the same task and the same prompt: the model learns one answer by heart, and "
        "the reward says nothing of other tasks.",
        "Give more tasks (some dozens teach more than one), and validate on tasks that are not trained on.",
        rollouts=ids(episodes),
    )


def _apart(evidence: Evidence, decode: Decode | None) -> Iterator[Finding]:
    """Siblings whose first prompts differ by a clock or a random id, so that nothing after it is shared."""
    if decode is None:
        return
    lost, total = 0, 0
    example: tuple[Episode, str, str] | None = None
    for group in evidence.groups:
        prompts = _first_prompts(group)
        total += sum(len(c.prompt_ids) for c in prompts)
        for call in prompts[1:]:
            at = common(prompts[0].prompt_ids, call.prompt_ids)
            if at == min(len(prompts[0].prompt_ids), len(call.prompt_ids)):
                continue
            before = decode(call.prompt_ids[max(0, at - _SHOWN) : at].tolist())
            was, now = (decode(c.prompt_ids[at : at + _SHOWN].tolist()) for c in (prompts[0], call))
            if differ_by_clock(before, was, now):
                lost += len(call.prompt_ids) - at
                example = (group[0], was, now)
    if example is None or lost < WORTH_A_WORD * total:
        return
    first, was, now = example
    yield warning(
        "prompts_not_shared",
        f"Siblings have other prompts because of a clock or a random id in them, so {lost / total:.0%} of the prompt "
        f"tokens are computed again for each: one goes on with {was[:40]!r}, another with {now[:40]!r}.",
        "Take the clock or id out of the prompt, or put it at its end: siblings share what comes before it, in "
        "sampling and in training.",
        tokens_lost=lost,
        was=was,
        now=now,
        rollouts=[first.rollout.rollout_id],
    )


def _left_out(evidence: Evidence) -> Iterator[Finding]:
    """Parts of the agent's requests that have no effect here."""
    found = {one.field: one for spans in evidence.spans.values() for one in left_out_of(spans)}
    shown = [one for one in found.values() if one.kind != "harmless"] or list(found.values())
    if shown:
        named = "; ".join(f"{one.field} ({one.why})" for one in shown[:_NAMED])
        more = f"; and {len(found) - len(shown[:_NAMED])} more" if len(found) > len(shown[:_NAMED]) else ""
        unseen = any(one.why == MEDIA for one in shown)
        yield (warning if unseen else note)(
            "left_out",
            f"Parts of the agent's requests have no effect here and were left out: {named}{more}.",
            UNSEEN if unseen else "",
            fields={one.field: one.why for one in found.values()},
        )


def _temperature(evidence: Evidence) -> Iterator[Finding]:
    """Agents that ask for another temperature than training samples at."""
    calls = [c for e in evidence.episodes for c in e.calls if c.info.trained]
    temperatures = [(c.info.asked["temperature"], c.info.temperature) for c in calls if "temperature" in c.info.asked]
    other = [(wanted, used) for wanted, used in temperatures if abs(wanted - used) > 0.01]
    if len(other) >= 0.5 * len(calls) and other:
        (wanted, used), _ = Counter(other).most_common(1)[0]
        yield note(
            "temperature_changed",
            f"The agent asks for temperature {wanted:g}, and training samples at {used:g}, because siblings must "
            "differ: rewards in training are those of this temperature. Validation asks for what the agent asks for.",
            asked=wanted,
            used=used,
        )
