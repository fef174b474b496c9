"""What the main process and the model process say to each other: msgpack frames with a length in front, never pickles.

The parent's first message is `ProcessSettings`; the child answers `Ready` or `CallFailed` (call_id 0). Afterwards the
parent sends requests, aborts and calls, in any number and order; the child sends the engine's events, at most one frame
of them per step, and one `Reply` or `CallFailed` per call. A closed socket is the end of either process.
"""

from __future__ import annotations

import struct
from typing import Any, Literal

import msgspec

from agentlightning import errors
from agentlightning.backend.base import BackendStats
from agentlightning.engine.base import EngineInfo
from agentlightning.engine.events import POLICY, Event, Request
from agentlightning.errors import AgentLightningError, EngineError
from agentlightning.learner.base import (
    LearnerOptions,
    LossConfig,
    OptimParams,
    PackedBatch,
    PackingCheck,
    PassResult,
    StepResult,
)
from agentlightning.learner.verl.sizes import Sizes
from agentlightning.types.arrays import Float32Array, Int32Array, np

HEADER = struct.Struct("!I")


class Lora(msgspec.Struct, frozen=True, kw_only=True):
    """Train a low-rank adapter instead of all weights."""

    rank: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    parts: list[str] = []
    """Instead of `target_modules`: some of `learner.adapters.PARTS`."""


class RankPlace(msgspec.Struct, frozen=True):
    """Which of a learner's ranks a process is."""

    rank: int
    ranks: int
    meeting: str
    """Where they find each other: tcp://host:port."""


class SocketAddress(msgspec.Struct, frozen=True):
    """Where a process waits to be told what to do, and what it is shown first."""

    host: str
    port: int
    key: str


class ProcessSettings(msgspec.Struct, frozen=True, kw_only=True, tag="settings"):
    """How to load the policy and how much of the machine to use. None: derived from the model or the machine."""

    model: str
    """A shipped model's name, a directory, or a Hugging Face id."""
    device: str = "auto"
    dtype: str = "float32"
    lora: Lora | None = None
    policies: dict[str, str | None] = {}
    """Several policies by name, each an adapter on `model`: the one in a directory, or None for a new one. Empty: the
    model itself is the only policy."""
    frozen: str | None = None
    """A name under which `model` samples without an adapter; it cannot learn. Without `policies` it is all there is
    until adapters are added (`AddPolicy`)."""
    members: list[str] = []
    """With `policies`: names of adapters that sample and cannot learn; see `ModelSpec.members`."""
    max_context: int | None = None
    max_concurrency: int = 64
    kv_budget_bytes: int | None = None
    prefill_tokens: int = 2048
    seed: int | None = None
    """For requests that bring no seed of their own."""
    in_flight: Literal["finish", "continue"] = "finish"
    """See `ModelSettings.in_flight`."""
    sampling_threads: int = 1
    """One leaves the other cores to the agents, which run while the engine samples."""
    learning_threads: int | None = None
    """None: all cores."""
    learner: LearnerOptions = LearnerOptions()
    ranks: int = 1
    """Processes that the learner is spread over."""
    tensor_parallel: int = 1
    """So many of them compute each token together."""
    place: RankPlace | None = None
    """For one of these processes."""
    followers: list[SocketAddress] = []
    """Where the ranks but the first wait; empty: they are started beside it."""
    verl: Sizes | None = None
    """Workers of verl's that passes and steps are done by; None: they are done here, or by `ranks`."""
    learns: bool = True
    """Whether there are learners; without, all policies sample only, and weights come with `TakeUp`."""


class Abort(msgspec.Struct, frozen=True, tag="abort"):
    """Drop a request; no more events come of it."""

    request_id: int


class Forward(msgspec.Struct, frozen=True, tag="forward"):
    batch: PackedBatch
    reference: bool = False


class Values(msgspec.Struct, frozen=True, tag="values"):
    batch: PackedBatch


class CheckPacking(msgspec.Struct, frozen=True, tag="check_packing"):
    batch: PackedBatch
    loss: LossConfig


class ForwardBackward(msgspec.Struct, frozen=True, tag="forward_backward"):
    batch: PackedBatch
    loss: LossConfig


class Evaluate(msgspec.Struct, frozen=True, tag="evaluate"):
    """The loss without its gradients."""

    batch: PackedBatch
    loss: LossConfig


class KeepRoutes(msgspec.Struct, frozen=True, tag="keep_routes"):
    batch: PackedBatch
    first: bool


class KeepHalf(msgspec.Struct, frozen=True, tag="keep_half"):
    share: float


class OptimStep(msgspec.Struct, frozen=True, tag="optim_step"):
    params: OptimParams


class SaveState(msgspec.Struct, frozen=True, tag="save_state"):
    path: str


class LoadState(msgspec.Struct, frozen=True, tag="load_state"):
    path: str


class Export(msgspec.Struct, frozen=True, tag="export"):
    path: str


class MoveReference(msgspec.Struct, frozen=True, tag="move_reference"):
    share: float


class TakeUp(msgspec.Struct, frozen=True, tag="take_up"):
    """Sample from the weights in a directory from now on."""

    path: str
    version: int | None = None
    """Theirs; None: one more than what was sampled from before."""


class AddPolicy(msgspec.Struct, frozen=True, kw_only=True, tag="add_policy"):
    """Have one more adapter on the model, under the name that the call is for."""

    lora: Lora | None = None
    """A new one like this, …"""
    path: str | None = None
    """… or the one in a directory."""
    seed: int = 0
    """Of a new one's weights."""
    learns: bool = True


class RemovePolicy(msgspec.Struct, frozen=True, tag="remove_policy"):
    """Forget an adapter and its optimiser; requests that sample from it fail."""


class Publish(msgspec.Struct, frozen=True, tag="publish"):
    """Sample from the learner's weights from now on."""


class Pause(msgspec.Struct, frozen=True, tag="pause"):
    """Start no request until `Resume`."""


class Resume(msgspec.Struct, frozen=True, tag="resume"):
    pass


class Reseed(msgspec.Struct, frozen=True, tag="reseed"):
    """Forget all contexts and draw from now on as a fresh engine with this seed would."""

    seed: int


class GetInfo(msgspec.Struct, frozen=True, tag="info"):
    pass


class GetStats(msgspec.Struct, frozen=True, tag="stats"):
    pass


class StopProcess(msgspec.Struct, frozen=True, tag="stop"):
    """End the process after what it is doing now."""


Verb = (
    Forward
    | Values
    | CheckPacking
    | ForwardBackward
    | Evaluate
    | KeepHalf
    | OptimStep
    | SaveState
    | LoadState
    | Export
    | MoveReference
    | KeepRoutes
    | TakeUp
    | AddPolicy
    | RemovePolicy
    | Publish
    | Pause
    | Resume
    | Reseed
    | GetInfo
    | GetStats
)


class MethodCall(msgspec.Struct, frozen=True, tag="call"):
    """Do something and answer. Calls are done one after the other; ids start at 1."""

    call_id: int
    verb: Verb
    policy: str = POLICY


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The policy is loaded."""

    info: EngineInfo


class Pulse(msgspec.Struct, frozen=True, tag="pulse"):
    """How far the process is, said every few seconds by a thread of its own."""

    passes: int
    """Steps of the engines and calls done so far."""
    cpu_seconds: float
    """Processor time used so far."""
    idle: bool
    """Whether it has nothing to do until somebody asks."""


class Events(msgspec.Struct, frozen=True, tag="events"):
    """What came out of one step of the engine."""

    events: list[Event]


class Reply(msgspec.Struct, frozen=True, kw_only=True, tag="reply"):
    """A call was done; the field that belongs to its verb is set."""

    call_id: int
    numbers: Float32Array | None = None
    """Log-probs or values."""
    passed: PassResult | None = None
    step: StepResult | None = None
    check: PackingCheck | None = None
    version: int | None = None
    info: EngineInfo | None = None
    stats: BackendStats | None = None


class CallFailed(msgspec.Struct, frozen=True, tag="refused"):
    """A call failed with this error (the name of a class in `agentlightning.errors`)."""

    call_id: int
    error: str
    message: str


ToChild = ProcessSettings | Request | Abort | MethodCall | StopProcess
ToParent = Ready | Pulse | Events | Reply | CallFailed

_DTYPES = {Int32Array: "int32", Float32Array: "float32"}


def _encode_array(value: Any) -> Any:
    """Arrays travel as their bytes; those of more than one dimension with their shape."""
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} cannot be sent to the model process")
    if value.dtype not in _DTYPES.values():
        raise TypeError(f"arrays are sent as int32 or float32, not as {value.dtype}")
    raw = np.ascontiguousarray(value).data.cast("B")
    return raw if value.ndim == 1 else [value.shape, raw]


def _decode_array(kind: Any, value: Any) -> np.ndarray:
    if isinstance(value, list):
        shape, raw = value
        return np.frombuffer(raw, dtype=_DTYPES[kind]).reshape(shape)
    return np.frombuffer(value, dtype=_DTYPES[kind])


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_array)
to_child = msgspec.msgpack.Decoder(ToChild, dec_hook=_decode_array)
to_parent = msgspec.msgpack.Decoder(ToParent, dec_hook=_decode_array)


def frame(message: ToChild | ToParent) -> bytes:
    """A message as it goes over the socket."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class Frames:
    """Cuts a stream of bytes into the bodies of frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Bodies that are complete with these bytes."""
        self._buffer += data
        bodies: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            end = start + HEADER.size + HEADER.unpack_from(self._buffer, start)[0]
            if len(self._buffer) < end:
                break
            bodies.append(bytes(memoryview(self._buffer)[start + HEADER.size : end]))
            start = end
        if start:
            del self._buffer[:start]
        return bodies


_OUT_OF_MEMORY = (
    "can't allocate memory",
    "MPS backend out of memory",
    "Cannot allocate memory",
    "failed to map segment",
)
"""What torch says in plain RuntimeErrors, on the CPU and on Apple's GPU; and what the system says of libraries."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether there was not enough memory, on the machine or a GPU."""
    of_a_gpu = type(error).__name__ == "OutOfMemoryError"  # torch's, which may not be imported yet
    return isinstance(error, MemoryError) or of_a_gpu or any(words in str(error) for words in _OUT_OF_MEMORY)


def error_name(error: AgentLightningError) -> str:
    """The name under which an error travels."""
    return type(error).__name__


def to_error(name: str, message: str) -> AgentLightningError:
    """The error that travelled under this name."""
    kinds = {kind.__name__: kind for kind in vars(errors).values() if isinstance(kind, type)}
    kind = kinds.get(name, EngineError)
    return kind(message) if issubclass(kind, AgentLightningError) else EngineError(message)
