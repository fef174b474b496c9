"""Replay: an attempt whose rollout has a recording is answered from it, as long as it asks the same.

A fork may edit messages: from the first call that is not recorded on, the model gets other texts in their place. Edits
change neutral messages, so they hold in every wire format. The agent does not see them: its later requests have the
original message again, which is found by its role, its place and its text, and replaced in the same way.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from agentlightning.engine.base import Chunk
from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.history.tree import digest, similar_key
from agentlightning.gateway.recording.records import span_id_of
from agentlightning.gateway.sampling.settings import SETTINGS
from agentlightning.rendering.messages import Message
from agentlightning.store.base import LightningStore
from agentlightning.types import Divergence, NamedResources
from agentlightning.types.arrays import Int32Array, np
from agentlightning.types.call import Segment, SegmentSource, SpanSource
from agentlightning.types.recording import (
    EditRole,
    RecordedAttempt,
    RecordedCall,
    recording_in,
    recording_of,
    tool_call_ids_of,
)

REPLAYED = "replayed_from"
"""Among the sampling settings of a call that was answered from a recording: the recorded call."""
_COMPARED = (*(name for name in SETTINGS if name != "seed"), "stop_token_ids", "min_tokens", "ignore_eos")
"""Sampling settings that have to be the same; a seed makes no difference to what was sampled already."""

_DEFAULTS: Mapping[str, Any] = {
    **{"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    **{"logit_bias": {}, "stop": (), "stop_token_ids": (), "min_tokens": 0, "ignore_eos": False},
}
"""The values of `params_for` for settings that are not given."""


async def replay_in(resources: NamedResources, store: LightningStore) -> AttemptReplay | None:
    """The replay of the first recording among a rollout's resources. Raises `Refusal` where its calls are gone."""
    found = recording_in(resources)
    if found is not None and found.call_ids:
        found = await _with_calls(found, store)
    return None if found is None else AttemptReplay(found)


async def _with_calls(recording: RecordedAttempt, store: LightningStore) -> RecordedAttempt:
    """A recording of calls that the store has, with their tokens."""
    name = recording.rollout_id
    calls = (await store.query_calls([name], latest_attempt_only=False)).get(name, ())
    known = {call.info.call_id: call for call in calls}
    if missing := [call_id for call_id in recording.call_ids if call_id not in known]:
        raise Refusal(
            f"This attempt is a fork of rollout {name}, whose call {missing[0]} is not in the store any more.",
            status=410,
            code="recording_lost",
        )
    answered = [known[call_id] for call_id in recording.call_ids]
    attempts = dict.fromkeys(call.info.attempt_id for call in answered)
    spans = [span for attempt in attempts for span in await store.query_spans(name, attempt)]
    made = recording_of(name, answered, tool_call_ids_of(spans))
    return recording.model_copy(update={"calls": made.calls})


class AttemptReplay:
    """What is left of a recording. Its calls may be asked for in any order, as several agents at once do."""

    def __init__(self, recording: RecordedAttempt) -> None:
        self._recording = recording
        self._left: list[tuple[RecordedCall, Int32Array]] = []
        before: list[int] = []
        for call in recording.calls:
            prompt = [*before[: call.prompt_keep], *call.prompt_ids]
            self._left.append((call, np.asarray(prompt, np.int32)))
            before = [*prompt, *call.response_ids]
        self._all = [*self._left]
        self.edits = _ConversationEdits(recording.edits)
        """What is changed in the calls that are sampled."""
        self.replayed = 0
        """Calls that were answered from it."""
        self._unreported: Divergence | None = None
        self.divergence: Divergence | None = None
        """How the first call that is not in it differs."""

    @property
    def over(self) -> bool:
        """Whether nothing more is answered from it, or refused because of it."""
        return not self._left if self.divergence is None else self._recording.diverged == "live"

    def reserve(
        self, policy: str, prompt_ids: Int32Array, used: Mapping[str, Any], choices: int
    ) -> dict[int, RecordedCall]:
        """The recorded answers to a request, by choice; choices without one are to be sampled. Raises `Refusal`."""
        found: dict[int, RecordedCall] = {}
        try:
            for index in range(choices):
                if (call := self.take(policy, prompt_ids, used)) is not None:
                    found[index] = call
        except Refusal:
            for call in found.values():
                self.give_back(call)
            raise
        return found

    def take(self, policy: str, prompt_ids: Int32Array, used: Mapping[str, Any]) -> RecordedCall | None:
        """The recorded answer to a call; None where it is to be sampled. Raises `Refusal` for one that is not in the
        recording, where those are refused."""
        if self.divergence is not None:
            return self._left_it()
        if not self._left:
            return None
        for at, (call, prompt) in enumerate(self._left):
            if call.policy == policy and np.array_equal(prompt, prompt_ids):
                if (changed := _changed(call.used, used)) is not None:
                    return self._diverge(len(prompt_ids), 0, f"the sampling setting {changed} is another")
                del self._left[at]
                self.replayed += 1
                return call
        _, nearest = max(self._left, key=lambda one: _shared(one[1], prompt_ids))
        at = _shared(nearest, prompt_ids)
        return self._diverge(at, len(nearest) - at, f"the prompt differs from the recorded one at token {at}")

    def give_back(self, call: RecordedCall) -> None:
        """A recorded answer did not reach its client whole, which may ask again."""
        self.replayed -= 1
        prompt = next(ids for one, ids in self._all if one is call)
        self._left.insert(0, (call, prompt))

    def resume(self, used: Mapping[str, Any], answer: Message | None) -> None:
        """A call with these settings was answered by an earlier gateway: from the recording, or by sampling, after
        which nothing of it is left."""
        source = used.get(REPLAYED)
        self.edits.resume(used)
        if source is None and answer is not None:
            self.edits.sampled(answer)
        self._left = [one for one in self._left if source is not None and one[0].call_id != source]

    def take_divergence(self) -> Divergence | None:
        """The divergence, once."""
        found, self._unreported = self._unreported, None
        return found

    def _diverge(self, position: int, lost: int, cause: str) -> None:
        self.divergence = self._unreported = Divergence(position, lost, f"replay: {cause}")
        self._left_it()

    def _left_it(self) -> None:
        """A call after the attempt has left the recording: it is sampled, unless that is to be refused."""
        if self._recording.diverged == "refuse" and self.divergence is not None:
            cause = self.divergence.cause.removeprefix("replay: ")
            raise Refusal(
                f"This attempt is a fork of rollout {self._recording.rollout_id} and asks something else in call "
                f"{self.replayed + 1}: {cause}. Likely causes are a clock, random numbers, or another tool's result.",
                code="fork_diverged",
            )


def _changed(recorded: Mapping[str, Any], used: Mapping[str, Any]) -> str | None:
    """The first sampling setting that is another."""
    return next((name for name in _COMPARED if _effective(recorded, name) != _effective(used, name)), None)


def _effective(used: Mapping[str, Any], name: str) -> Any:
    """A setting as an engine takes it: one that is not given has its default, and JSON has lists in place of tuples."""
    value = used.get(name)
    value = _DEFAULTS.get(name) if value is None else value
    return tuple(value) if isinstance(value, list) else value


def _shared(a: Int32Array, b: Int32Array) -> int:
    least = min(len(a), len(b))
    (differ,) = np.nonzero(a[:least] != b[:least])
    return int(differ[0]) if len(differ) else least


def with_sources(
    segments: Sequence[Segment], call: RecordedCall, prompt_segment_id: str, response_segment_id: str
) -> tuple[Segment, ...]:
    """The segments of a call that was answered from the record, with those that have the same tokens there."""
    recorded = {prompt_segment_id: call.prompt_segment_id, response_segment_id: call.response_segment_id}
    return tuple(
        replace(segment, source=SegmentSource(call.attempt_id, source))
        if (source := recorded.get(segment.segment_id))
        else segment
        for segment in segments
    )


def span_source_of(call: RecordedCall) -> SpanSource | None:
    """The span of the recorded call, where the attempt that made it is known."""
    return SpanSource(call.attempt_id, span_id_of(call.call_id)) if call.attempt_id else None


def stopped_by(call: RecordedCall, stop: Sequence[str], decode: Callable[[Sequence[int]], str]) -> str | None:
    """The stop string that ended a recorded response, as engines find it: the one that begins first in its end."""
    if call.length or not stop:
        return None
    window = max(len(s.encode()) for s in stop) + 1
    text = decode(call.response_ids[-window:])
    found = [(text.find(s), s) for s in stop if s in text]
    return min(found)[1] if found else None


async def recorded_chunks(call: RecordedCall, stop_string: str | None = None) -> AsyncGenerator[Chunk, None]:
    """The recorded response as an engine gives it: a chunk for each weight version. `stop_string`: what ended it."""
    ends: Sequence[int] = [start for start, _ in call.versions[1:]] + [len(call.response_ids)]
    for (start, version), end in zip(call.versions or [(0, 0)], ends, strict=True):
        yield Chunk(
            ids=np.asarray(call.response_ids[start:end], np.int32),
            logprobs=np.asarray(call.logprobs[start:end], np.float32),
            plain_logprobs=np.asarray(call.plain_logprobs[start:end], np.float32),
            version=version,
            finish_reason=("length" if call.length else "stop") if end == len(call.response_ids) else None,
            stop_string=stop_string if end == len(call.response_ids) else None,
        )


EDITED = "edited"
"""Among the sampling settings of a call whose conversation was edited: each `EditedMessage`."""
EDITABLE: Mapping[EditRole, str] = {
    "system": "first system message",
    "user": "last user message",
    "assistant": "last assistant message",
    "tool": "last tool result",
}
"""The message that an edit picks in a conversation's first live call, by its role."""


class EditedMessage(msgspec.Struct, frozen=True):
    """A message that the model got with another text."""

    role: EditRole
    index: int
    """Its place among the messages of the request, from 0."""
    original: str
    """A digest of the text that the agent sent."""


class _ConversationEdits:
    """The edits of one attempt, and which messages they were applied to.

    A message that was edited once is edited in each call that has it. Otherwise a call that holds no answer sampled by
    this attempt is the first live call of a conversation, in which each edit picks its message.
    """

    def __init__(self, texts: Mapping[EditRole, str]) -> None:
        self._texts = texts
        self._known: list[EditedMessage] = []
        self._sampled: set[bytes] = set()

    def __bool__(self) -> bool:
        return bool(self._texts)

    def apply(self, messages: Sequence[Message]) -> tuple[list[Message], tuple[EditedMessage, ...]]:
        """The conversation as the model gets it, and what was edited. Raises `Refusal` where the first live call of
        the attempt has no message to edit."""
        found = [one for role in self._texts if (one := self._message(role, messages)) is not None]
        self._known += [one for one in found if one not in self._known]
        edited = list(messages)
        for one in found:
            edited[one.index] = {**edited[one.index], "content": self._texts[one.role]}
        return edited, tuple(found)

    def sampled(self, answer: Message) -> None:
        """This answer was sampled by the attempt: a conversation that holds it has had its first live call."""
        if self._texts:
            self._sampled.add(similar_key(answer))

    def resume(self, used: Mapping[str, Any]) -> None:
        """An earlier gateway served a call with these settings."""
        found = msgspec.convert(used.get(EDITED, ()), tuple[EditedMessage, ...])
        self._known += [one for one in found if one not in self._known]

    def wrote(self, message: Message) -> bool:
        """Whether a message has the text of an edit."""
        return self._texts.get(message["role"]) == message["content"]

    def _message(self, role: EditRole, messages: Sequence[Message]) -> EditedMessage | None:
        """The message that the edit of this role is applied to; None where the conversation has none."""
        known = [one for one in self._known if one.role == role]
        found = next((one for one in known if self._has(messages, one)), None)
        if found is not None or self._goes_on(messages):
            return found
        places = [at for at, message in enumerate(messages) if message["role"] == role]
        if places:
            at = places[0 if role == "system" else -1]
            return EditedMessage(role, at, _digest(messages[at]))
        if known:  # another conversation was edited
            return None
        raise Refusal(missing_for(role, messages), code="edit_without_message", param="messages")

    def _has(self, messages: Sequence[Message], one: EditedMessage) -> bool:
        if one.index >= len(messages) or messages[one.index]["role"] != one.role:
            return False
        message = messages[one.index]
        return self.wrote(message) or _digest(message) == one.original

    def _goes_on(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation holds an answer that this attempt sampled."""
        return any(message["role"] == "assistant" and similar_key(message) in self._sampled for message in messages)


def _digest(message: Message) -> str:
    return digest(message["content"]).hex()


def missing_for(role: EditRole, messages: Sequence[Message]) -> str:
    """What is to be said of a conversation in which the edit of this role finds no message."""
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    has = f"messages of the roles {roles}" if roles else "a raw prompt and no messages"
    return (
        f"This fork edits the {EDITABLE[role]} of its first call after the record, which has no message of the role "
        f"'{role}': it has {has}. Edit one that it has, or fork at another call: agl fork --at N."
    )
