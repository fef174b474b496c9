"""Types that annotations and small helpers of older scripts use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, Protocol

from pydantic import BaseModel, Field
from typing_extensions import TypedDict

from agentlightning.types import PaginatedResult, RolloutMode, Span, Triplet
from agentlightning.types.ids import random_hex
from agentlightning.types.names import ANNOTATION, EXCEPTION, MESSAGE, OBJECT, OPERATION, REWARD, VIRTUAL

TaskInput = Any
AttributeValue = str | bool | int | float | Sequence[str] | Sequence[bool] | Sequence[int] | Sequence[float]
TraceState = dict[str, str]
StatusCode = Literal["UNSET", "OK", "ERROR"]


class FilterField(TypedDict, total=False):
    exact: Any
    within: Sequence[Any]
    contains: str


FilterOptions = Mapping[str, Any]


class SortOptions(TypedDict):
    name: str
    order: Literal["asc", "desc"]


class SpanNames(StrEnum):
    """Names of the spans that are written here."""

    ANNOTATION = ANNOTATION
    MESSAGE = MESSAGE
    OBJECT = OBJECT
    EXCEPTION = EXCEPTION
    OPERATION = OPERATION
    REWARD = REWARD
    VIRTUAL = VIRTUAL


class SpanAttributeNames(StrEnum):
    """Keys of the attributes of messages and objects."""

    MESSAGE = "agentlightning.message.body"
    OBJECT = "agentlightning.object.json"


class SpanCoreFields(Span):
    """A span that does not know its attempt yet; an agent that returns it gives it one."""

    rollout_id: str = ""
    attempt_id: str = ""
    trace_id: str = Field(default_factory=lambda: random_hex(16))
    span_id: str = Field(default_factory=lambda: random_hex(8))


class SpanRecordingContext(Protocol):
    """What `tracer.operation_context` gives."""

    def record_exception(self, exception: BaseException) -> None: ...

    def record_attributes(self, attributes: Mapping[str, Any]) -> None: ...

    def record_status(self, status_code: StatusCode, description: str | None = None) -> None: ...

    def get_recorded_span(self) -> Span: ...


class ParallelWorkerBase:
    """The life cycle that tracers, runners and hooks share: once per process, once per worker."""

    def __init__(self) -> None:
        self.worker_id: int | None = None

    def init(self, *args: Any, **kwargs: Any) -> None:
        """Once, before there are workers."""

    def init_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """In each worker."""
        self.worker_id = worker_id

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The work."""

    def teardown_worker(self, worker_id: int, *args: Any, **kwargs: Any) -> None:
        """Undo `init_worker`."""

    def teardown(self, *args: Any, **kwargs: Any) -> None:
        """Undo `init`."""


def from_core_fields(
    cls: type[Span], core: Span, *, rollout_id: str, attempt_id: str, sequence_id: int = 0, **_: Any
) -> Span:
    """`Span.from_core_fields`: the span of an attempt."""
    given = {name: getattr(core, name) for name in Span.model_fields}
    return cls(**{**given, "rollout_id": rollout_id, "attempt_id": attempt_id, "sequence_id": sequence_id})


# ---- records of the protocol of 0.1 ----------------------------------------------------------------------------------


class Task(BaseModel):
    """A task as the server of 0.1 handed it out."""

    rollout_id: str
    input: Any
    mode: RolloutMode | None = None
    resources_id: str | None = None
    create_time: float | None = None
    last_claim_time: float | None = None
    num_claims: int | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class TaskIfAny(BaseModel):
    """A task, or that there is none."""

    is_available: bool
    task: Task | None = None


class RolloutLegacy(BaseModel):
    """What a client of 0.1 reported of a rollout."""

    rollout_id: str
    task: Task | None = None
    final_reward: float | None = None
    triplets: list[Triplet] | None = None
    trace: list[dict[str, Any]] | None = None
    logs: list[str] | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)


class GenericResponse(BaseModel):
    """What the server of 0.1 answered."""

    status: str = "success"
    message: str | None = None
    data: dict[str, Any] | None = None


RolloutRawResultLegacy = None | float | list[Triplet] | list[dict[str, Any]] | RolloutLegacy


def count(self: PaginatedResult[Any], value: Any) -> int:
    """Pages were sequences of their items."""
    return list(self.items).count(value)


def index(self: PaginatedResult[Any], value: Any, *bounds: int) -> int:
    """The place of an item on its page."""
    return list(self.items).index(value, *bounds)
