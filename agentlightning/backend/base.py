"""The backend's seam: what owns the engines and learners of a run's policies, and gets weights from one to the other.

    engine(policy)     samples tokens                    (`engine.base.Engine`)
    learner(policy)    updates weights                   (`learner.base.Learner`)
    publish(policy)    the engine samples from the learner's weights from now on

Implementations: `embedded` (a model process of our own), `inprocess` (the same in a thread), `vllm` (vLLM servers
beside a learner). A backend is chosen by name, or given as any callable that makes one from a `ModelSpec`;
`agentlightning.backend.BACKENDS` is the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import msgspec
from pydantic import NonNegativeInt, PositiveInt

from agentlightning.arguments import SettingsGroup
from agentlightning.engine.base import Engine
from agentlightning.engine.events import POLICY
from agentlightning.errors import ConfigError
from agentlightning.learner.base import Learner


@dataclass(frozen=True, kw_only=True)
class ComputeSettings(SettingsGroup):
    """Where and how a model is computed: `GRPO(…, compute=agl.ComputeSettings(dtype="bfloat16", ranks=2))`."""

    device: str = "auto"
    """Where to compute: "cpu", "cuda", "cuda:1", "mps", …; "auto" is a GPU if there is one."""
    dtype: str = "float32"
    """"float32" or "bfloat16"; with "bfloat16" the optimiser keeps float32 copies of the trained weights."""
    max_concurrency: PositiveInt = 64
    """Requests sampled at the same time; further ones wait."""
    in_flight: Literal["finish", "continue"] = "finish"
    """What happens to responses in progress when new weights are published: they finish with the old weights while
    learning waits, or continue with the new ones after recomputing their context. Each token records its version."""
    gradient_checkpointing: bool = False
    """Uses less memory in a pass, for about a third more time."""
    offload: bool = False
    """For a policy on a GPU: keep the optimiser and its float32 copies in CPU memory, and run its step there."""
    ranks: PositiveInt = 1
    """Processes that share the learner; each holds a part of weights, gradients and optimiser (FSDP2)."""
    tensor_parallel: PositiveInt = 1
    """Number of ranks that compute each token together, each with a part of every layer's heads and width."""
    backend_options: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the backend, by name."""


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The model that is sampled and trained, as users set it."""

    model: str
    """A model that ships with the package, a directory, a checkpoint, or a Hugging Face id."""
    lora_rank: PositiveInt | None = None
    """Train a LoRA adapter of this rank instead of all weights."""
    policies: Sequence[str] | Mapping[str, str | None] = ()
    """Aliases of several LoRA policies on one model, each with its own calls and rewards; or a mapping of alias to the
    adapter directory to start from (None: a new one)."""
    frozen: str | None = None
    """With `policies`: an alias for the model without an adapter, which is never trained."""
    max_context: PositiveInt = 4096
    """Prompt plus response, in tokens; at most what the model supports."""
    seed: NonNegativeInt | None = None
    """Seeds what is sampled for requests that bring no seed, and new adapters' weights."""

    @property
    def adapters(self) -> dict[str, str | None]:
        """By alias, the adapter that each of several policies goes on from; empty where there is one policy.

        Raises ConfigError for aliases that cannot be.
        """
        given: Any = self.policies  # of a script, it may be anything
        aliases = [*given, *([self.frozen] if self.frozen is not None else [])] if isinstance(given, Collection) else []
        texts = all(isinstance(alias, str) for alias in aliases)
        if (
            isinstance(given, str | bytes)
            or not isinstance(given, Collection)
            or not texts
            or len(set(aliases)) < len(aliases)
        ):
            also = "" if self.frozen is None else f", frozen is {self.frozen!r}"
            raise ConfigError(
                f"policies is {given!r}{also}; policies takes a list of different names, for example "
                "policies=['solver', 'checker'], and frozen one more."
            )
        found = dict(given) if isinstance(given, Mapping) else dict.fromkeys(given)
        if self.frozen is not None and not found:
            raise ConfigError("frozen names the base model next to several policies; give policies=[…] with it.")
        for alias in aliases:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", alias):
                raise ConfigError(f"A policy cannot be called {alias!r}: use letters, digits, - and _.")
        return found

    @property
    def trained(self) -> list[str]:
        """The aliases of the policies that learn."""
        return list(self.adapters) or [POLICY]


@dataclass(frozen=True, kw_only=True)
class ModelSpec(ModelSettings, ComputeSettings):
    """What a backend is to load: the model, and what the algorithm needs of its learners."""

    reference: str | None = None
    """The model that KL and DPO compare with; None: none is needed."""
    critic: bool = False
    """Train a value head beside the policy."""
    members: Sequence[str] = ()
    """With `policies`: aliases of adapters that are sampled and never trained. Each is the model without an adapter
    until it takes one up (`TakesUp`)."""
    folder: str | None = None
    """Where a backend may leave its logs; None: nowhere in particular."""


class BackendStats(msgspec.Struct, frozen=True, kw_only=True):
    """Since the backend started: wall-clock seconds by what they went into, and tokens."""

    sampling_s: float
    learning_s: float
    idle_s: float
    tokens_sampled: int
    prefill_tokens: int
    cached_tokens: int
    """Prompt tokens that were not computed, because an engine held them already."""
    running: int
    waiting: int
    published_bytes: int = 0
    """Bytes of weights that were written where engines read them; the engines of a machine share one copy."""
    publication_seconds: Mapping[str, float] = {}
    """By engine, how long it took to take up what was published last; empty where nothing has to move."""


class Backend(Protocol):
    """Owns the engines and learners of all policies. Made from a `ModelSpec`, started once, closed once."""

    async def start(self) -> None:
        """Load the policies. Raises `ModelError`, `ConfigError` or `EngineError`; then nothing is left running."""
        ...

    def engine(self, policy: str) -> Engine:
        """What samples the policy with this alias, frozen ones included."""
        ...

    def learner(self, policy: str) -> Learner:
        """What updates the policy with this alias."""
        ...

    async def publish(self, policy: str) -> int:
        """Let the engine sample from the learner's weights; returns their version, that of the last `optim_step`.

        Requests that are being sampled finish first, or go on under the new weights, as `ModelSettings.in_flight` says;
        either way nothing that old weights computed is used again. Between `optim_step` and `publish` a backend whose
        engine shares memory with its learner samples nothing. The training loop checks what came of it on tokens
        sampled afterwards (`parts.sync_check`).
        """
        ...

    async def pause(self) -> None:
        """Start no further requests; those that are being sampled go on. Further ones wait."""
        ...

    async def resume(self) -> None:
        """Undo `pause`."""
        ...

    async def reseed(self, seed: int) -> None:
        """Let all engines forget their contexts and draw as fresh ones with this seed would."""
        ...

    async def watch(self) -> NoReturn:
        """Wait until the backend ends by itself, and raise `BackendDied` that says how."""
        ...

    async def stats(self) -> BackendStats | None:
        """How it spent its time; None where that is not known."""
        ...

    async def checkpoint(self, uri: str) -> None:
        """Write `uri`/model (loads with plain transformers; a directory for each of several policies) and
        `uri`/optimizer, each all or nothing."""
        ...

    async def restore(self, uri: str) -> None:
        """Take up optimiser state and version of a checkpoint, on a backend that was started from its weights, and
        publish them."""
        ...

    async def close(self) -> None:
        """End everything; what still waits for it raises `EngineError`. Idempotent."""
        ...


@runtime_checkable
class TakesUp(Protocol):
    """What a backend may be able to do besides: hold earlier selves of a policy, or other adapters, as opponents."""

    async def take_up(self, policy: str, uri: str) -> None:
        """Let one of `ModelSpec.members` sample from the adapter in the directory `uri` from now on; requests that it
        is sampling finish first. Raises `ModelError` where there is none that fits."""
        ...


@dataclass(frozen=True, slots=True)
class Drain:
    """Machines of a learner are about to be taken away."""

    message: str
    """Which of its processes are on them, in a sentence."""
    can_move: bool
    """Whether all processes of the backend find room on the machines that stay."""


@runtime_checkable
class Drains(Protocol):
    """What a backend may be able to do besides: know beforehand that machines of its learner will be taken away. Each
    step is saved from then on, and the run starts again from there once there is room on other machines."""

    @property
    def drain(self) -> Drain | None:
        """What is known of it; None while all machines stay."""
        ...


def drain_of(backend: Backend) -> Drain | None:
    """What is known of machines that the learner will lose; None where all stay, or nothing is ever known of it."""
    return backend.drain if isinstance(backend, Drains) else None


BackendFactory = Callable[[ModelSpec], Backend]
