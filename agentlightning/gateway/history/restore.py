"""Sessions rebuilt from the store: an attempt that was served by an earlier gateway goes on with its exact tokens.

Tokens come from the stored calls, messages from their spans. What the earlier gateway had sampled but not yet stored is
lost; a request that builds on such a response marks the attempt, so that it can be tried again.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from agentlightning.gateway.attempts import LiveAttempt
from agentlightning.gateway.history.tree import Turn
from agentlightning.gateway.recording.records import ARGUMENTS, CALL_ID, REMEMBERS_FROM, SAME_INPUT, message_of
from agentlightning.gateway.sampling.settings import cut_off_by
from agentlightning.rendering.messages import Message, Tool
from agentlightning.store.base import LightningStore
from agentlightning.types import Attributes, Call

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _StoredCall:
    """A stored call: its turn, and the messages up to and including its answer."""

    turn: Turn
    messages: list[Message]
    tools: Sequence[Tool] | None
    arguments: Mapping[str, Any]


async def restore(store: LightningStore, live: LiveAttempt, only: str | None = None) -> None:
    """Fill an attempt's fresh session with what the store has of it; or with one call that left memory, and those that
    it continues.
    """
    calls = (await store.query_calls([live.rollout_id])).get(live.rollout_id, ())
    calls = [call for call in calls if call.info.attempt_id == live.attempt_id]
    calls = calls if only is None else _continued(calls, only)
    if not calls:
        return
    spans = await store.query_spans(live.rollout_id, live.attempt_id)
    attributes = {str(span.attributes[CALL_ID]): span.attributes for span in spans if CALL_ID in span.attributes}
    stored: dict[str, _StoredCall] = {}
    for call in calls:
        added = _added(live, call, attributes, stored)
        if only is not None:
            continue
        if added:
            _count(live, call)
        if live.replay is not None and call.info.error is None:
            live.replay.resume(call.info.used, stored[call.info.call_id].messages[-1] if added else None)
    if only is not None:
        return
    live.requests = len({call.info.response_id for call in calls})
    live.restored = True
    logger.info("Attempt %s goes on with %d calls from the store.", live.attempt_id, len(calls))


def _continued(calls: Sequence[Call], last: str) -> list[Call]:
    """The call, and those before it that it continues, in their order."""
    known = {call.info.call_id: call for call in calls}
    chain: list[Call] = []
    at = known.pop(last, None)
    while at is not None:
        chain.append(at)
        at = known.pop(at.info.parent_call_id or "", None)
    return chain[::-1]


def _added(live: LiveAttempt, call: Call, attributes: Mapping[str, Attributes], stored: dict[str, _StoredCall]) -> bool:
    """Whether the call could be added. One whose span says anything else than what a gateway writes is lost."""
    own = attributes.get(call.info.call_id, {})
    try:
        return _add(live, call, own, attributes.get(str(own.get(SAME_INPUT)), own), stored)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        logger.warning("Call %s of the store is left out: its span cannot be read (%r).", call.info.call_id, error)
        return False


def _add(
    live: LiveAttempt, call: Call, attributes: Attributes, input: Attributes, stored: dict[str, _StoredCall]
) -> bool:
    """Whether the call could be added. `input`: the attributes that hold its input, its own or those of the response's
    first choice.
    """
    info = call.info
    parent = stored.get(info.parent_call_id) if info.parent_call_id else None
    new = [message_of(m) for m in json.loads(input.get("gen_ai.input.messages", "[]"))]
    outputs = [message_of(m) for m in json.loads(attributes.get("gen_ai.output.messages", "[]"))]
    if info.parent_call_id and parent is None:
        return False  # it continues a call that is lost
    messages = [*(parent.messages if parent else ()), *new]
    own_tools: Sequence[Tool] | None = json.loads(input.get("gen_ai.tool.definitions", "null"))
    tools = parent.tools if parent else own_tools
    arguments = parent.arguments if parent else json.loads(input.get(ARGUMENTS, "{}"))
    answer: Message = outputs[0] if outputs else {"role": "assistant", "content": ""}
    turn = live.session(info.policy).restore(call, messages, tools, answer, parent.turn if parent else None, arguments)
    stored[info.call_id] = _StoredCall(turn, [*messages, answer], tools, arguments)
    remembers_from = attributes.get(REMEMBERS_FROM)
    if remembers_from is not None:
        live.answered[info.response_id] = [*messages[remembers_from:], answer]
    return True


def _count(live: LiveAttempt, call: Call) -> None:
    if call.info.error is not None:
        live.count(failed=1)
        return
    live.count(calls=1, prompt_tokens=len(call.prompt_ids), response_tokens=len(call.response_ids))
    limit = cut_off_by(call.info.finish_reason, call.info.used, len(call.response_ids))
    if limit is not None or call.info.choice == 0:  # as the last response ended
        live.summary = msgspec.structs.replace(live.summary, limit=limit)
