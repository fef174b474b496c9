"""Edits: the messages that a fork replaces before the model gets them, from the first call that is not recorded on.

They change neutral messages, so they hold in every wire format. The agent does not see them: its later requests have
the original message again, which is found by its role, its place and its text, and replaced in the same way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from agentlightning.gateway.exchange import Refusal
from agentlightning.gateway.history.keys import digest, similar_key
from agentlightning.rendering.messages import Message
from agentlightning.types.recording import EditRole

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


class ConversationEdits:
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
        raise Refusal(_missing(role, messages), code="edit_without_message", param="messages")

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


def _missing(role: EditRole, messages: Sequence[Message]) -> str:
    roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
    has = f"messages of the roles {roles}" if roles else "a raw prompt and no messages"
    return (
        f"This fork edits the {EDITABLE[role]} of its first call after the record, which has no message of the role "
        f"'{role}': it has {has}. Edit one that it has, or fork at another call: agl fork --at N."
    )
