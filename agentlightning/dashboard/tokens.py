"""What the token view and the token tree show: each segment once, with what was recorded of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from agentlightning.dashboard.groups import advantages_of
from agentlightning.dashboard.rollouts import requested
from agentlightning.dashboard.texts import Texts, branches, texts_of
from agentlightning.store.operations.codec import decode
from agentlightning.store.operations.segments import SegmentRow
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import CallInfo
from agentlightning.types.arrays import float32_array, int32_array

MOST_TOKENS = 200_000
"""Of one attempt."""


async def of_rollout(store: SqlLightningStore, request: Request) -> Any:
    """The segments of an attempt in the order of their parents, and the calls that end in them."""
    rollout_id = request.path_params["rollout_id"]
    rollout, _, attempt = await requested(store, request)
    table = await store.fetch_calls([rollout_id], latest_attempt_only=False)
    rows = table.segments.get(attempt.attempt_id, []) if attempt else []
    infos = [
        (row, decode(row.info, "calls.info", row.rollout_id, type=CallInfo))
        for row in table.calls
        if attempt and row.attempt_id == attempt.attempt_id
    ]
    texts, why = await texts_of(store, rollout.run_id)
    calls = (await store.query_calls([rollout_id], latest_attempt_only=False))[rollout_id]
    left = branches(rollout, [c for c in calls if attempt and c.info.attempt_id == attempt.attempt_id], texts)
    worth = await advantages_of(store, rollout)
    total = sum(row.length for row in rows)
    sampled = _sampled_by(rows, {row.response_segment_id: row.prompt_segment_id for row, _ in infos})
    return {
        "texts": why,
        "advantages": worth.reason,
        "tokens": total,
        "segments": [_segment(row, sampled.get(row.segment_id), texts) for row in _within(rows)],
        "calls": [
            {
                "call_id": info.call_id,
                "prompt_segment": row.prompt_segment_id,
                "response_segment": row.response_segment_id,
                "trained": info.trained,
                "agent": info.agent,
                "policy": info.policy,
                "finish_reason": info.finish_reason,
                "continues": info.parent_call_id,
                "temperature": info.temperature,
                "divergence": left.get(info.call_id),
                "advantages": worth.by_call.get(info.call_id),
            }
            for row, info in infos
        ],
    }


def _within(rows: Sequence[SegmentRow]) -> list[SegmentRow]:
    taken, count = [], 0
    for row in rows:
        count += row.length
        if count > MOST_TOKENS:
            break
        taken.append(row)
    return taken


def _sampled_by(rows: Sequence[SegmentRow], prompt_of: dict[str, str]) -> dict[str, str]:
    """Which segments are (part of) a response: those between a call's prompt and its end; by the response's segment."""
    parents = {row.segment_id: row.parent_id for row in rows}
    found: dict[str, str] = {}
    for response, prompt in prompt_of.items():
        current: str | None = response
        while current is not None and current != prompt:
            found[current] = response
            current = parents.get(current)
    return found


def _segment(row: SegmentRow, response: str | None, texts: Texts | None) -> dict[str, Any]:
    ids = list(int32_array(row.ids).tolist())
    return {
        "segment_id": row.segment_id,
        "parent": row.parent_id,
        "keep": row.parent_keep,
        "response": response,
        "ids": ids,
        "texts": None if texts is None else texts(ids),
        "logprobs": _floats(row.logprobs),
        "plain_logprobs": _floats(row.plain_logprobs),
        "versions": msgspec.json.decode(row.versions) if row.versions else [],
    }


def _floats(data: bytes | None) -> list[float | None] | None:
    if data is None:
        return None
    return [None if x != x else round(x, 5) for x in float32_array(data).tolist()]
