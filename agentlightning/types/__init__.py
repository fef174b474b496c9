"""The nouns of the system as frozen records. Imports nothing of the package but itself and `errors`."""

from agentlightning.types.call import Call, CallInfo, CallRecord, Divergence, Segment, VersionRun
from agentlightning.types.data import Dataset, Hook, PaginatedResult, Triplet
from agentlightning.types.record import RolloutRecord
from agentlightning.types.resource import LLM, NamedResources, PromptTemplate, ProxyLLM, Resource, ResourcesUpdate
from agentlightning.types.rollout import (
    DEFAULT_LEASE_SECONDS,
    DEFAULT_TIMEOUT_SECONDS,
    Attempt,
    AttemptedRollout,
    EnqueueRolloutRequest,
    Rollout,
    RolloutConfig,
    Worker,
)
from agentlightning.types.run import Run, RunEvent, RunEventKind, RunStatus
from agentlightning.types.span import Attributes, Event, Link, OtelResource, Span, SpanContext, SpanStatus
from agentlightning.types.status import (
    ATTEMPT_TRANSITIONS,
    FINISHED_ATTEMPT,
    FINISHED_ROLLOUT,
    ROLLOUT_TRANSITIONS,
    AttemptStatus,
    Outcome,
    RolloutMode,
    RolloutStatus,
    WorkerStatus,
)

__all__ = [
    "ATTEMPT_TRANSITIONS",
    "DEFAULT_LEASE_SECONDS",
    "DEFAULT_TIMEOUT_SECONDS",
    "FINISHED_ATTEMPT",
    "FINISHED_ROLLOUT",
    "LLM",
    "ROLLOUT_TRANSITIONS",
    "Attempt",
    "AttemptStatus",
    "AttemptedRollout",
    "Attributes",
    "Call",
    "CallInfo",
    "CallRecord",
    "Dataset",
    "Divergence",
    "EnqueueRolloutRequest",
    "Event",
    "Hook",
    "Link",
    "NamedResources",
    "OtelResource",
    "Outcome",
    "PaginatedResult",
    "PromptTemplate",
    "ProxyLLM",
    "Resource",
    "ResourcesUpdate",
    "Rollout",
    "RolloutConfig",
    "RolloutMode",
    "RolloutRecord",
    "RolloutStatus",
    "Run",
    "RunEvent",
    "RunEventKind",
    "RunStatus",
    "Segment",
    "Span",
    "SpanContext",
    "SpanStatus",
    "Triplet",
    "VersionRun",
    "Worker",
    "WorkerStatus",
]
