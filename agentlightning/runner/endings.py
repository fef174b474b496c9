"""How an attempt ended: its outcome, and the words for what went wrong. Pure."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from agentlightning.errors import message_of
from agentlightning.frames import is_library
from agentlightning.keys import redacted
from agentlightning.runner.hints import OWN_KEY, hint_for, hint_of_task, hint_with_calls, hint_without_calls
from agentlightning.store.operations.codec import readable
from agentlightning.types import Outcome

MOST_CHARACTERS = 64_000
"""Of an error; what is longer loses its middle."""
_PACKAGE = Path(__file__).parents[1]
_OURS = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("runner", "litagent"))


class GatewaySummary(Protocol):
    """What the gateway saw of an attempt."""

    @property
    def calls(self) -> int: ...

    @property
    def limit(self) -> str | None:
        """The limit of the run that ended it: a call was refused or cut off there, and the agent did not go on."""
        ...

    @property
    def infra_error(self) -> str | None:
        """Why a call failed for a reason that is not the agent's."""
        ...

    @property
    def forwarded(self) -> int:
        """Answers of other providers."""
        ...

    @property
    def refused(self) -> str | None:
        """Why the last call that the gateway refused was."""
        ...

    @property
    def refused_by_provider(self) -> str | None:
        """Which call another provider refused for good."""
        ...

    @property
    def lost(self) -> str | None:
        """Why answers that the agent was given are missing in the store, or may be."""
        ...

    @property
    def rewarded(self) -> bool:
        """A reward came by HTTP."""
        ...


@dataclass(frozen=True, slots=True)
class Ending:
    """How an attempt ended."""

    outcome: Outcome
    error: str | None = None
    rewarded: bool = True
    """Whether a reward is known by now. One may have come to the gateway by HTTP instead."""
    exception: BaseException | None = None
    """What the agent, its tracer or its judge raised."""


def with_gateway(ending: Ending, summary: GatewaySummary) -> Ending:
    """What the gateway knows better: a failure that was the system's, or the end of what the agent may use.

    An attempt whose calls are not all recorded is tried again, however its agent ended: what it earned belongs to calls
    that nobody has. Clients raise when they are refused at a limit, so an agent's error after that is truncation: it is
    trained with what was earned by then, or with 0. Where the model in training had answered and another provider
    refused, that one was the judge (or a tool that is one): the agent did not fail.
    """
    if summary.lost and ending.outcome is not Outcome.CANCELLED:
        return Ending(Outcome.INFRA_ERROR, "\n".join(filter(None, (summary.lost, ending.error))))
    if ending.outcome is Outcome.AGENT_ERROR and summary.infra_error:
        message, _, way = (ending.error or "").partition("\n")
        sentence = (
            message if summary.infra_error not in message else ""
        )  # a client that repeats what the gateway answered
        return Ending(Outcome.INFRA_ERROR, "\n".join(filter(None, (summary.infra_error, sentence, way))))
    if ending.outcome is Outcome.AGENT_ERROR and summary.refused_by_provider and summary.calls:
        return Ending(Outcome.JUDGE_ERROR, f"{summary.refused_by_provider}\n{ending.error}")
    if ending.outcome is Outcome.AGENT_ERROR and summary.refused_by_provider and not summary.forwarded:
        ending = replace(ending, error=_after_the_first_line(ending.error or "", summary.refused_by_provider))
    if ending.outcome is Outcome.AGENT_ERROR and summary.limit:
        return Ending(Outcome.TRUNCATED, f"{summary.limit}\n{ending.error}")
    unanswered = _unanswered(ending, summary)
    if unanswered is not None:
        return unanswered
    if ending.outcome is Outcome.OK:
        outcome = Outcome.TRUNCATED if summary.limit else Outcome.OK
        return Ending(outcome, rewarded=ending.rewarded or summary.rewarded)
    if summary.refused_by_provider:
        return ending  # its client has the right address and key: the refusal came through the gateway
    return _with_hint(ending, was_called=summary.calls > 0)


def _after_the_first_line(error: str, words: str) -> str:
    message, _, way = error.partition("\n")
    return "\n".join(filter(None, (message, words, way)))


def _with_hint(ending: Ending, *, was_called: bool) -> Ending:
    """With what its exception probably comes from, now that it is known whether the model had answered."""
    hint = (hint_with_calls if was_called else hint_without_calls)(ending.exception)
    if not hint or not ending.error:
        return ending
    message, _, way = ending.error.replace(f"\n{OWN_KEY}", "" if was_called else f"\n{OWN_KEY}").partition("\n")
    return replace(ending, error="\n".join(filter(None, (message, hint, way))))


def _unanswered(ending: Ending, summary: GatewaySummary) -> Ending | None:
    """How an attempt ended all of whose model calls were refused: whatever it earned, the model has no part in it."""
    if summary.refused is None or summary.calls or summary.forwarded or summary.limit:
        return None
    why = f"None of its model calls was answered. The last one: {summary.refused}"
    if ending.outcome is Outcome.OK:
        return Ending(Outcome.AGENT_ERROR, why)
    if ending.outcome is Outcome.AGENT_ERROR and summary.refused not in (ending.error or ""):
        return replace(ending, error="\n".join(filter(None, (ending.error, why))))
    return None


def describe(error: BaseException, task: object = None) -> str:
    """The message, what it probably comes from, and the way through the user's own files (or, if none, all files)."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(_OURS)]
    own = [f for f in frames if not is_library(f.filename)]
    hint, trace = hint_for(error) or hint_of_task(error, task), "".join(traceback.format_list(own or frames))
    sentence = "\n".join(filter(None, (": ".join(filter(None, (type(error).__name__, message_of(error)))), hint)))
    text = redacted(f"{sentence}\n{trace}".rstrip())
    if not isinstance(error, BaseExceptionGroup):
        return text
    return "\n".join([text, *(f"one of them: {describe(e)}" for e in error.exceptions[:3])])


def storable(text: str | None) -> str | None:
    """An error's text as any database takes it: Unicode without NUL, and not endless."""
    if text is None:
        return None
    dropped = len(text) - MOST_CHARACTERS
    if dropped > 0:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n… {dropped} characters left out …\n{text[-half:]}"
    return readable(text)
