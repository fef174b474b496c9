"""The operations of a store over HTTP, a row each: the server's routes, the client and the OpenAPI document follow.

What an operation takes and returns stands in its method of `LightningStore` and nowhere else: the parameters that its
path does not name are the fields of the body. One that the body leaves out is left to the method's default, and so is
null where the parameter has no None.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Union, get_args, get_origin, get_type_hints

import msgspec
from pydantic import TypeAdapter, ValidationError

from agentlightning.errors import StoreError
from agentlightning.keys import SPANS, TASK
from agentlightning.store import queries
from agentlightning.store.base import LightningStore, Unset
from agentlightning.store.http.wire import (
    JSON,
    MAX_WAIT_SECONDS,
    METRICS_PATH,
    MSGPACK,
    OTLP_PATH,
    PREFIX,
    PROTOBUF,
    Problem,
)
from agentlightning.store.operations.resources import decode_resources
from agentlightning.types import (
    Attempt,
    AttemptedRollout,
    NamedResources,
    PaginatedResult,
    Resource,
    Rollout,
    RunEvent,
    Span,
)

Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=MAX_WAIT_SECONDS)]
BOUNDS = {
    "limit": Annotated[int, msgspec.Meta(ge=1, le=10_000)],
    "timeout": Seconds,
    "quiet_seconds": Annotated[float, msgspec.Meta(ge=0.0)],
}
"""Of parameters of these names, in every body."""


class RequestBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A request's body: an unknown field is an error."""

    not_null: ClassVar[frozenset[str]] = frozenset()
    """Fields that count as left out where they are null."""

    def given(self) -> dict[str, Any]:
        """What it says, as keywords."""
        values = msgspec.structs.asdict(self)
        left_out = self.not_null
        return {n: v for n, v in values.items() if v is not msgspec.UNSET and (v is not None or n not in left_out)}


class Named(dict[str, Resource]):
    """Resources, which the wire has as their fields."""


@dataclass(frozen=True, kw_only=True, eq=False)
class HttpOperation:
    """How one operation goes over HTTP."""

    name: str
    """The method of `LightningStore`, or what the server does where there is no such method."""
    verb: str
    path: str
    summary: str
    body: Any = None
    """What its body says, or the query string of a GET; None: nothing."""
    answer: Any = None
    """None: nothing, with status 204."""
    otherwise: str | None = None
    """The words of the status 404 where the method returns None."""
    scope: str | None = None
    """The scope by which an attempt's key opens it, for this attempt; None: only the admin key does."""
    waits: bool = False
    """It may wait for `timeout` seconds, while its client is connected."""
    takes: str = JSON
    gives: str = JSON
    names: Mapping[str, str] = field(default_factory=dict)
    """Parameters that are called otherwise in the body."""
    makes: Mapping[str, str] = field(default_factory=dict)
    """Ids that a client makes where none is given, so that it may repeat the request, and what they begin with."""
    checks: bool = False
    """A client checks the id in the path, which the operation may create."""
    seen: bool = False
    """It holds text that others wrote, which is made readable where it is no Unicode, not refused."""

    @cached_property
    def ids(self) -> list[str]:
        """The parameters that stand in its path."""
        return re.findall(r"{(\w+)}", self.path)

    @cached_property
    def answers(self) -> TypeAdapter[Any]:
        """Reads and writes the answer."""
        return TypeAdapter(self.answer)

    @cached_property
    def _decoder(self) -> msgspec.json.Decoder[Any]:
        return msgspec.json.Decoder(self.body, strict=False, dec_hook=_from_wire)

    def read(self, body: bytes) -> Any:
        """The body's record. Raises `StoreError` for what is none, which names the field that is wrong."""
        try:
            return self._decoder.decode(body)
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise _not_valid(error) from None

    def read_query(self, parameters: Sequence[tuple[str, str]]) -> Any:
        """As `read`, of a query string."""
        values: dict[str, Any] = {}
        for name, value in parameters:
            known = self.body.model_fields.get(name)
            if known is not None and "tuple" in str(known.annotation):
                values.setdefault(name, []).append(value)
            else:
                values[name] = value
        try:
            return msgspec.convert(values, self.body, dec_hook=_from_wire)
        except msgspec.MsgspecError as error:
            raise _not_valid(error) from None


class _Invalid(ValueError):
    """A record in a body is not valid; `parts` say where and why."""

    def __init__(self, error: ValidationError) -> None:
        super().__init__()
        found = error.errors(include_url=False, include_context=False, include_input=False)
        self.parts = [(".".join(map(str, one["loc"])), one["msg"]) for one in found]


def _from_wire(kind: Any, value: Any) -> Any:
    if kind is Named:
        return Named(decode_resources(msgspec.convert(value, dict[str, dict[str, Any]])))
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _Invalid(error) from None


def _not_valid(error: Exception) -> StoreError:
    """What is wrong with a body, in the words of who wrote it."""
    complaint, _, place = str(error).partition(" - at `$")
    where = re.sub(r"\[(\d+|\.\.\.)\]", r".\1", place.rstrip("`")).strip(".")
    parts = [("", complaint)]
    if isinstance(error.__cause__, _Invalid):
        parts = error.__cause__.parts
    elif (unknown := re.fullmatch(r"Object contains unknown field `(.*)`", complaint, re.DOTALL)) is not None:
        parts = [(unknown[1], "there is no such field")]
    elif (missing := re.fullmatch(r"Object missing required field `(.*)`", complaint, re.DOTALL)) is not None:
        parts = [(missing[1], "it must be given")]
    words = [": ".join(filter(None, (".".join(filter(None, (where, inner))), why))) for inner, why in parts]
    return StoreError("The request is not valid: " + "; ".join(words))


# ---- from the protocol's signatures ----------------------------------------------------------------------------------


def _kinds(hint: Any) -> list[Any]:
    return list(get_args(hint)) if get_origin(hint) in (Union, UnionType) else [hint]


def _on_the_wire(kind: Any) -> Any:
    if kind == NamedResources:
        return Named
    return list[get_args(kind)] if get_origin(kind) is Sequence else kind


def _body_of(name: str, path: str, names: Mapping[str, str] | None) -> type[RequestBody]:
    """The body of a method of the protocol: the parameters that the path does not name."""
    method = getattr(LightningStore, name)
    hints, fields, not_null = get_type_hints(method, include_extras=True), list[Any](), set[str]()
    for parameter in list(inspect.signature(method).parameters.values())[1:]:
        own = parameter.name
        if f"{{{own}}}" in path or parameter.kind is parameter.VAR_KEYWORD:
            continue
        kinds = [_on_the_wire(kind) for kind in _kinds(hints[own]) if kind is not Unset]
        if own in BOUNDS:
            kinds = [BOUNDS[own]]
        if parameter.default is parameter.empty:
            fields.append((own, Union[tuple(kinds)]))  # noqa: UP007
            continue
        if NoneType not in kinds and Any not in kinds:
            not_null.add(own)
        fields.append((own, Union[(*kinds, None, msgspec.UnsetType)], msgspec.UNSET))
    title = "".join(part.title() for part in name.split("_"))
    space = {"not_null": frozenset(not_null), "__doc__": method.__doc__}
    return msgspec.defstruct(  # pyright: ignore[reportReturnType]
        title, fields, bases=(RequestBody,), namespace=space, rename=names, kw_only=True
    )


def _answer_of(name: str) -> Any:
    hint = get_type_hints(getattr(LightningStore, name))["return"]
    kinds = [_on_the_wire(kind) for kind in _kinds(hint) if kind is not NoneType]
    return Union[tuple(kinds)] if kinds else None  # noqa: UP007


def _row(name: str, route: str, summary: str, **more: Any) -> HttpOperation:
    """A row, whose body and answer follow from the protocol where they are not given."""
    verb, path = route.split()
    path = path if path in (OTLP_PATH, METRICS_PATH) else PREFIX + path
    if hasattr(LightningStore, name):
        if verb != "GET" and "body" not in more:
            more["body"] = _body_of(name, path, more.get("names"))
        more.setdefault("answer", _answer_of(name))
    return HttpOperation(name=name, verb=verb, path=path, summary=summary, **more)


def _query(
    name: str, path: str, summary: str, query: type[queries.PageQuery], **more: Any
) -> tuple[HttpOperation, ...]:
    """By GET and by POST."""
    return tuple(_row(name, route, summary, body=query, **more) for route in (f"GET {path}", f"POST {path}/search"))


# ---- bodies that are not the parameters of one method ----------------------------------------------------------------

_update_attempt = _row(
    "update_attempt", "POST /rollouts/{rollout_id}/attempts/{attempt_id}", "Change an attempt, or send its heartbeat"
)


class AttemptChangeItem(RequestBody):
    """One of many changes in one request."""

    rollout_id: str
    attempt_id: str
    change: _update_attempt.body  # pyright: ignore[reportInvalidTypeForm]


class Wait(RequestBody):
    rollout_ids: list[str]
    timeout: Seconds = 0.0
    any: bool = False
    """True: return when one is finished; False: when all are."""


class NextSequence(RequestBody):
    rollout_id: str
    attempt_id: str


class PresenceBody(RequestBody):
    timeout: Seconds = 0.0


# ---- the table -------------------------------------------------------------------------------------------------------

OPERATIONS: tuple[HttpOperation, ...] = (
    # the queue
    _row(
        "enqueue_many_rollouts",
        "POST /queues/rollouts/enqueue",
        "Enqueue rollouts, all or none",
        names={"requests": "rollouts"},
    ),
    _row(
        "dequeue_many_rollouts",
        "POST /queues/rollouts/dequeue",
        "Claim queued rollouts, waiting for the first one",
        waits=True,
    ),
    _row(
        "wait_for_rollouts",
        "POST /waits/rollouts",
        "Wait until one or all of some rollouts are finished",
        body=Wait,
        answer=list[AttemptedRollout | Rollout],
        waits=True,
    ),
    # rollouts and attempts
    _row(
        "start_rollout",
        "POST /rollouts",
        "Create a rollout and claim it",
        makes={"rollout_id": "ro", "attempt_id": "at"},
    ),
    *_query(
        "query_rollouts",
        "/rollouts",
        "Rollouts by filter",
        queries.RolloutQuery,
        answer=PaginatedResult[AttemptedRollout | Rollout],
    ),
    _row(
        "get_rollout_by_id",
        "GET /rollouts/{rollout_id}",
        "A rollout with its latest attempt",
        otherwise="There is no rollout '{rollout_id}' in the store.",
        scope=TASK,
    ),
    _row("update_rollout", "POST /rollouts/{rollout_id}", "Change a rollout"),
    _row("start_attempt", "POST /rollouts/{rollout_id}/attempts", "Claim this rollout", makes={"attempt_id": "at"}),
    *_query("query_attempts", "/rollouts/{rollout_id}/attempts", "Attempts of a rollout", queries.AttemptQuery),
    _update_attempt,
    _row(
        "update_attempts",
        "POST /attempts/update",
        "Change many attempts; each succeeds or fails by itself",
        body=list[AttemptChangeItem],
        answer=list[Attempt | Problem],
    ),
    # spans and calls
    _row(
        "add_many_spans",
        "POST /spans",
        "Store spans; those that were there already are left out of the answer",
        body=list[Span],
        answer=list[dict[str, Any]],
        scope=SPANS,
        seen=True,
    ),
    *_query("query_spans", "/spans", "Spans of a rollout", queries.SpanQuery),
    _row("get_next_span_sequence_id", "POST /spans/next", "Reserve a sequence number"),
    _row(
        "get_many_span_sequence_ids",
        "POST /spans/next/many",
        "Reserve a sequence number for each attempt",
        body=list[NextSequence],
    ),
    _row("add_calls", "POST /calls", "Store calls with their token segments", body=bytes, takes=MSGPACK),
    _row("query_calls", "POST /calls/search", "Calls of rollouts as stored", answer=bytes, gives=MSGPACK),
    _row(
        "query_records", "POST /records/search", "All that an algorithm reads of rollouts", answer=bytes, gives=MSGPACK
    ),
    _row("add_traces", f"POST {OTLP_PATH}", "OTLP/HTTP intake", body=bytes, answer=bytes, scope=SPANS, takes=PROTOBUF),
    # resources and workers
    _row("add_resources", "POST /resources", "Add resources", makes={"resources_id": "rs"}),
    *_query("query_resources", "/resources", "Versions of resources", queries.ResourcesQuery),
    _row(
        "get_latest_resources",
        "GET /resources/latest",
        "The latest resources",
        otherwise="There are no resources in the store yet.",
    ),
    _row(
        "get_resources_by_id",
        "GET /resources/{resources_id}",
        "Resources by id",
        otherwise="There are no resources '{resources_id}' in the store.",
    ),
    _row(
        "update_resources",
        "PUT /resources/{resources_id}",
        "Insert or replace resources; the version grows by one",
        checks=True,
    ),
    *_query("query_workers", "/workers", "Workers", queries.WorkerQuery),
    _row(
        "get_worker_by_id",
        "GET /workers/{worker_id}",
        "A worker",
        otherwise="There is no worker '{worker_id}' in the store.",
    ),
    _row(
        "update_worker", "POST /workers/{worker_id}", "A worker's heartbeat; keeps its attempts alive too", checks=True
    ),
    _row(
        "release_worker", "POST /workers/{worker_id}/release", "Give back what a worker holds that is gone", checks=True
    ),
    _row("stay", "POST /workers/{worker_id}/presence", "Kept open by a worker, whose end it shows", body=PresenceBody),
    # runs
    _row("begin_run", "POST /runs", "Store a run that begins or goes on", seen=True),
    *_query("query_runs", "/runs", "Runs", queries.RunQuery),
    _row("add_run_events", "POST /runs/events", "Append what runs measured or said", body=list[RunEvent], seen=True),
    _row("get_run_by_id", "GET /runs/{run_id}", "A run", otherwise="There is no run '{run_id}' in the store."),
    _row("update_run", "POST /runs/{run_id}", "Say where a run stands", seen=True),
    *_query("query_run_events", "/runs/{run_id}/events", "What a run measured and said", queries.RunEventQuery),
    # the store itself
    _row("health", "GET /health", "Is the server there?", answer=dict[str, str]),
    _row("statistics", "GET /statistics", "Counts per status"),
    _row("metrics", f"GET {METRICS_PATH}", "Counts for Prometheus", answer=bytes, gives="text/plain; version=0.0.4"),
)

BY_NAME = {operation.name: operation for operation in OPERATIONS}
"""Queries by POST."""
_EXACT = {(one.verb, one.path): one for one in OPERATIONS if "{" not in one.path}
_PATTERNS: defaultdict[tuple[str, int], list[tuple[HttpOperation, re.Pattern[str]]]] = defaultdict(list)
for _one in OPERATIONS:
    if "{" in _one.path:
        _pattern = re.compile(re.sub(r"{(\w+)}", r"(?P<\1>[^/]+)", _one.path))
        _PATTERNS[_one.verb, _one.path.count("/")].append((_one, _pattern))


def find(verb: str, path: str) -> tuple[HttpOperation, dict[str, str]] | None:
    """The operation that a request means, and the ids in its path."""
    if (exact := _EXACT.get((verb, path))) is not None:
        return exact, {}
    for operation, pattern in _PATTERNS.get((verb, path.count("/")), ()):
        if (found := pattern.fullmatch(path)) is not None:
            return operation, found.groupdict()
    return None


def verbs_of(path: str) -> list[str]:
    """What may be done with a path."""
    return [verb for verb in ("GET", "POST", "PUT") if find(verb, path) is not None]
