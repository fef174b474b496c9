"""What the table and the page of rollouts show: filters become one query; a rollout is shown call by call."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.datastructures import QueryParams
from starlette.requests import Request

from agentlightning.algorithm.episode import make_episode, weights_of
from agentlightning.dashboard.runs import name_of, number
from agentlightning.dashboard.texts import branches, cut, shown, texts_of
from agentlightning.errors import NotFoundError, StoreError
from agentlightning.installation import command_name
from agentlightning.store.operations.query import ListedRollout
from agentlightning.store.sql import SqlLightningStore
from agentlightning.types import Attempt, Call, Rollout, Span
from agentlightning.types.names import CALL_ID, PARENT_CALL_ID, SAME_INPUT
from agentlightning.types.recording import CONTINUED
from agentlightning.types.reward import get_rewards

PAGE = 50
MOST_PAGE = 500
MOST_COUNT = 1_000_000
MOST_SPANS = 5000
"""Of one attempt."""
MOST_FORKS = 500
"""Of one rollout."""
MOST_ATTRIBUTE = 4000
"""Characters of an attribute in the waterfall."""
_MANY = {
    "run": "run_id_in",
    "status": "status_in",
    "mode": "mode_in",
    "outcome": "outcome_in",
    "group": "group_in",
    "step": "step_in",
}
_MESSAGES = ("gen_ai.input.messages", "gen_ai.output.messages", "gen_ai.tool.definitions", "agentlightning.request")
_SHOWN_APART = (*_MESSAGES, "agentlightning.response")


async def listed(store: SqlLightningStore, request: Request) -> Any:
    """A page of the table, after `cursor`."""
    limit = min(number(request, "limit") or PAGE, MOST_PAGE)
    params = request.query_params
    page = await store.list_rollouts(
        **_filters(params),
        sort_by=params.get("sort") or "start_time",
        sort_order="asc" if params.get("order") == "asc" else "desc",
        cursor=params.get("cursor") or None,
        limit=limit,
    )
    return {"rollouts": [_in_list(one) for one in page], "next": page.next_cursor}


async def rewards(store: SqlLightningStore, request: Request) -> Any:
    """The lowest and the highest reward of a run's rollouts, which colours are relative to; None: there is none."""
    query: dict[str, Any] = {"run_id_in": [request.path_params["run_id"]], "sort_by": "reward", "limit": 1}
    lowest = await store.list_rollouts(**query, sort_order="asc", reward_min=-sys.float_info.max)
    highest = await store.list_rollouts(**query, sort_order="desc", reward_min=-sys.float_info.max)
    return {"low": lowest[0].reward if len(lowest) else None, "high": highest[0].reward if len(highest) else None}


async def counted(store: SqlLightningStore, request: Request) -> Any:
    return {"count": await store.count_rollouts(MOST_COUNT, **_filters(request.query_params))}


def _filters(params: QueryParams) -> dict[str, Any]:
    """The keywords of a query. Raises `StoreError` for a value that cannot be."""
    given: dict[str, Any] = {}
    for name, keyword in _MANY.items():
        if values := [value for value in params.getlist(name) if value]:
            given[keyword] = values
    for name in ("reward_min", "reward_max"):
        if text := params.get(name):
            try:
                given[name] = float(text)
            except ValueError:
                raise StoreError(f"'{name}' must be a number, not {text[:40]!r}.") from None
    if text := params.get("q"):
        given["text_contains"] = text
    return given


def _in_list(one: ListedRollout) -> dict[str, Any]:
    error = (one.error or "").strip().splitlines()
    return {**one._asdict(), "error": error[-1] if error else None}


# ---- one rollout -----------------------------------------------------------------------------------------------------


async def one(store: SqlLightningStore, request: Request) -> Any:
    """The rollout with all attempts, and one attempt's conversation and spans."""
    rollout_id = request.path_params["rollout_id"]
    rollout, attempts, attempt = await requested(store, request)
    page = None
    if attempt is not None:
        page = await store.query_spans(rollout_id, attempt.attempt_id, limit=MOST_SPANS)
    spans = [] if page is None else list(page)
    latest = (await store.list_rollouts(rollout_id_in=[rollout_id]))[0]
    calls = (await store.query_calls([rollout_id], latest_attempt_only=False))[rollout_id]
    mine = [call for call in calls if attempt is not None and call.info.attempt_id == attempt.attempt_id]
    texts, _ = await texts_of(store, rollout.run_id)
    left = branches(rollout, mine, texts)
    return {
        **_in_list(latest),
        "task": shown(rollout.input),
        "metadata": shown(rollout.metadata),
        "run_name": await run_name(store, rollout.run_id),
        "resources_id": rollout.resources_id,
        "attempts_made": [shown(a.model_dump(mode="json")) for a in attempts],
        "attempt_id": attempt and attempt.attempt_id,
        "reward": make_episode(rollout, attempt, mine, spans, await weights_of(store, rollout.run_id)).reward,
        "calls": _calls(spans, {call.info.call_id: call for call in mine}, left),
        "fork_command": await _fork_command(store, rollout),
        "forks": await _forks(store, rollout, mine),
        "spans": [_in_waterfall(span) for span in spans],
        "spans_left_out": 0 if page is None else max(0, page.total - len(spans)),
    }


async def _fork_command(store: SqlLightningStore, rollout: Rollout) -> str:
    """What runs the rollout again in a terminal; `--at` and a number belong behind it."""
    run = await store.get_run_by_id(rollout.run_id) if rollout.run_id else None
    place = shlex.quote(str((run.state if run else {}).get("run_dir") or "RUN"))
    return f"{command_name()} fork {place} {shlex.quote(rollout.rollout_id)} --trust"


async def _forks(store: SqlLightningStore, rollout: Rollout, calls: Sequence[Call]) -> list[dict[str, Any]]:
    """The rollouts that the run let go on from this one, each with the call before which it did and its reward."""
    about = [rollout.metadata.get(key) for key in CONTINUED]
    named = [of.get("trained") for of in about if isinstance(of, dict) and of.get("of") == rollout.rollout_id]
    ids = [str(i) for one in named if isinstance(one, list) for i in one][:MOST_FORKS]
    found = await store.query_rollouts(rollout_id_in=ids, limit=-1) if ids else []
    rewards = {one.rollout_id: one for one in await store.list_rollouts(rollout_id_in=ids, limit=-1)} if ids else {}
    return [
        {
            "rollout_id": one.rollout_id,
            "call_id": calls[at].info.call_id,
            "reward": rewards[one.rollout_id].reward,
            "outcome": rewards[one.rollout_id].outcome,
        }
        for one in found
        if isinstance(at := one.metadata.get("at"), int) and 0 <= at < len(calls) and one.rollout_id in rewards
    ]


async def run_name(store: SqlLightningStore, run_id: str | None) -> str | None:
    """What people call the run of a rollout."""
    run = await store.get_run_by_id(run_id) if run_id else None
    return run_id if run is None else name_of(run)


async def requested(store: SqlLightningStore, request: Request) -> tuple[Rollout, list[Attempt], Attempt | None]:
    """The rollout that a request names, its attempts, and the one of them that is meant."""
    rollout_id = request.path_params["rollout_id"]
    rollout = await store.get_rollout_by_id(rollout_id)
    if rollout is None:
        raise NotFoundError("There is no such rollout in this store: it may have been pruned.")
    attempts = list(await store.query_attempts(rollout_id, limit=100, sort_by="sequence_id"))
    return rollout, attempts, chosen(attempts, request.query_params.get("attempt"))


def chosen(attempts: Sequence[Attempt], attempt_id: str | None) -> Attempt | None:
    """The attempt that is asked for, else the last one."""
    if attempt_id is None:
        return attempts[-1] if attempts else None
    found = next((a for a in attempts if a.attempt_id == attempt_id), None)
    if found is None:
        raise NotFoundError("This rollout has no such attempt.")
    return found


def _calls(
    spans: Sequence[Span], recorded: Mapping[str, Call], left: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """Model calls in order, each with the messages that it adds. `left`: those that left a known history."""
    found = []
    answered = 0
    for span in sorted((s for s in spans if CALL_ID in s.attributes), key=lambda s: s.start_time or 0.0):
        attributes = span.attributes
        call = recorded.get(str(attributes[CALL_ID]))
        info = call and call.info
        reasons = attributes.get("gen_ai.response.finish_reasons") or [None]
        found.append(
            {
                "call_id": attributes[CALL_ID],
                "span_id": span.span_id,
                "continues": attributes.get(PARENT_CALL_ID),
                "same_input_as": attributes.get(SAME_INPUT),
                "agent": attributes.get("gen_ai.agent.name"),
                "model": attributes.get("gen_ai.response.model") or attributes.get("gen_ai.request.model"),
                "trained": info.trained if info else False,
                "recorded": info is not None,
                "answered_before": answered,
                "versions": sorted({run.version for run in call.versions}) if call else [],
                "finish_reason": reasons[0] if isinstance(reasons, list) and reasons else reasons,
                "prompt_tokens": attributes.get("gen_ai.usage.input_tokens"),
                "response_tokens": attributes.get("gen_ai.usage.output_tokens"),
                "divergence": left.get(str(attributes[CALL_ID])),
                "temperature": info.temperature if info else None,
                "start_time": span.start_time,
                "end_time": span.end_time,
                "error": span.status.description if span.status.status_code == "ERROR" else None,
                "input": _messages(attributes.get("gen_ai.input.messages")),
                "output": _messages(attributes.get("gen_ai.output.messages")),
                "tools": _decoded(attributes.get("gen_ai.tool.definitions")),
            }
        )
        answered += call is not None and len(call.response_ids) > 0
    return found


def _decoded(value: Any) -> Any:
    """JSON text as its value; what is none as it is."""
    if isinstance(value, str):
        try:
            value = msgspec.json.decode(value)
        except (msgspec.MsgspecError, RecursionError):
            return cut(value)
    return shown(value)


def _messages(value: Any) -> list[dict[str, Any]]:
    """Messages in the GenAI conventions' shape; what an agent's own instrumentation wrote may be anything."""
    decoded = _decoded(value)
    if decoded is None:
        return []
    found = []
    for message in decoded if isinstance(decoded, list) else [decoded]:
        if not isinstance(message, dict):
            message = {"role": "unknown", "parts": [{"type": "text", "content": str(message)}]}
        parts = message.get("parts")
        if not isinstance(parts, list):
            parts = [{"type": "text", "content": message.get("content", "")}]
        found.append({"role": str(message.get("role", "unknown")), "parts": [p for p in parts if isinstance(p, dict)]})
    return found


def _in_waterfall(span: Span) -> dict[str, Any]:
    rest = {k: v for k, v in span.attributes.items() if k not in _SHOWN_APART}
    return {
        "span_id": span.span_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "start_time": span.start_time,
        "end_time": span.end_time,
        "status": span.status.status_code,
        "description": span.status.description,
        "rewards": get_rewards(span),
        "call_id": span.attributes.get(CALL_ID),
        "attributes": shown(rest, MOST_ATTRIBUTE),
        "events": [shown(event.model_dump(mode="json"), MOST_ATTRIBUTE) for event in span.events],
    }
