"""What the token view and the token tree show: each segment once, with what was recorded of its tokens."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.requests import Request

from agentlightning.dashboard.advantages import advantages_of
from agentlightning.dashboard.rollouts import chosen
from agentlightning.errors import ModelError, NotFoundError
from agentlightning.models import resolve_model
from agentlightning.store.operations.segments import SegmentRow
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import CallInfo
from agentlightning.types.arrays import float32_array, int32_array

MOST_TOKENS = 200_000
"""Of one attempt."""


async def of_rollout(store: SqlLightningStore, request: Request) -> Any:
    """The segments of an attempt in the order of their parents, and the calls that end in them."""
    rollout_id = request.path_params["rollout_id"]
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        raise NotFoundError("There is no such rollout in this store: it may have been pruned.")
    attempts = list(await store.query_attempts(rollout_id, limit=100, sort_by="sequence_id"))
    attempt = chosen(attempts, request.query_params.get("attempt"))
    table = await store.fetch_calls([rollout_id], latest_attempt_only=False)
    rows = table.segments.get(attempt.attempt_id, []) if attempt else []
    infos = [
        (row, msgspec.json.decode(row.info, type=CallInfo))
        for row in table.calls
        if attempt and row.attempt_id == attempt.attempt_id
    ]
    texts, why = await texts_of(store, rollout.run_id)
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
                "divergence": None if info.divergence is None else msgspec.to_builtins(info.divergence),
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


class Texts:
    """The text of each token by itself; what is only a part of a character is shown as such."""

    def __init__(self, tokenizer: Any) -> None:
        self._decode = functools.lru_cache(maxsize=65_536)(lambda token: tokenizer.decode([token]))

    def __call__(self, ids: Sequence[int]) -> list[str]:
        return [self._decode(token) for token in ids]


@functools.lru_cache(maxsize=8)
def _load(model: str) -> Texts | str:
    """The tokenizer of a model, or why there is none. Never fetched from the network."""
    from pathlib import Path

    try:
        place = resolve_model(model)
        if not Path(place).is_dir():
            from huggingface_hub import try_to_load_from_cache

            cached = try_to_load_from_cache(place, "tokenizer.json")
            if not isinstance(cached, str):
                return f"The tokenizer of {model} is not on this machine, so tokens are shown as numbers."
            place = str(Path(cached).parent)
        from agentlightning.rendering.tokenizer import FileTokenizer

        if not (Path(place) / "tokenizer.json").is_file():
            return f"{model} has no tokenizer.json, so tokens are shown as numbers."
        return Texts(FileTokenizer(Path(place), model))
    except ImportError:
        return "The training extra is not installed here, so tokens are shown as numbers."
    except (ModelError, OSError, ValueError) as error:
        return f"Tokens are shown as numbers: {error}"


async def texts_of(store: SqlLightningStore, run_id: str | None) -> tuple[Texts | None, str | None]:
    """The texts of a run's tokens; or None and why."""
    run = await store.get_run_by_id(run_id) if run_id else None
    model = run.settings.get("model") if run else None
    if not isinstance(model, str):
        return None, "It is not known which model these tokens are of, so they are shown as numbers."
    found = await asyncio.to_thread(_load, model)
    return (None, found) if isinstance(found, str) else (found, None)
