"""What users set of the Ray backend, with `backend_options`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from agentlightning.backend.vllm.options import ServerOptions
from agentlightning.errors import ConfigError

Layout = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]
"""How Ray lays what it places over the machines: close together, or apart."""


class RayOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each is a key of `backend_options`."""

    address: str | None = None
    """Of a cluster that this machine is part of: "auto" or host:port. None: what RAY_ADDRESS says, or else a cluster of
    this machine alone that is started for the run."""
    engines: int | Literal["auto"] = 1
    """Engine processes; each holds the whole model. "auto": one at first, and then as many as there is room for."""
    engine: Literal["own", "vllm"] = "own"
    """What samples: this package's engine, or vLLM servers."""
    vllm: ServerOptions = ServerOptions()
    """Of the servers."""
    cpus_per_rank: float = 1.0
    """CPUs that Ray counts for one rank of the learner; it computes with so many threads."""
    cpus_per_engine: float = 1.0
    cpus_per_runner: float = 1.0
    gpus_per_rank: float | None = None
    """None: one where the cluster has GPUs and `device` is not "cpu"."""
    gpus_per_engine: float | None = None
    """None: as many as a rank has; as a vLLM server spreads the model over, where the cluster has GPUs."""
    learner: Literal["own", "verl"] | None = None
    """Who computes on the ranks: this package, or verl's workers. None: this package, unless another option needs
    verl's."""
    sequence_parallel: int = 1
    """So many ranks share each row of tokens (verl's workers only, on GPUs)."""
    offload: bool = False
    """Keep weights and optimiser in the machines' memory while GPUs do not compute with them (verl's workers only)."""
    placement: Layout = "PACK"
    """How ranks and engines are laid over the machines."""
    wait_seconds: float = 60.0
    """How long to wait for room: a cluster may be busy, or grow."""
    start_seconds: float = 600.0
    """How long a process may take to load the model."""
    restarts: int = 3
    """How often in a row an engine or a runner that dies is started again, before the run is stopped."""
    object_store_memory: int | None = None
    """Bytes of shared memory of a cluster that is started here; published weights go through it. None: Ray's choice."""
    runtime_env: dict[str, Any] = {}
    """What the processes need that the machines do not have; see Ray's documentation of runtime environments."""

    def cpus(self, ranks: int) -> float:
        """What Ray must count for engines and a learner of so many ranks, and whoever drives them where they are
        verl's."""
        return (ranks + self.on_verl) * self.cpus_per_rank + self.first_engines * self.cpus_per_engine

    @property
    def first_engines(self) -> int:
        """How many a run begins with."""
        return 1 if self.engines == "auto" else self.engines

    @property
    def on_verl(self) -> bool:
        return self.learner == "verl" or (self.learner is None and self._needs_verl)

    @property
    def _needs_verl(self) -> bool:
        return self.sequence_parallel > 1 or self.offload


def _what_there_is(error: msgspec.ValidationError) -> str:
    """The values that an option can have, where one has another; else the options."""
    at = re.search(r"at `\$\.(\w+)`", str(error))
    hint = get_type_hints(RayOptions)[at[1]] if at else None
    values = [value for part in (hint, *get_args(hint)) if get_origin(part) is Literal for value in get_args(part)]
    if at and values:
        a_number = ["a number"] if int in get_args(hint) else []
        return f"{at[1]} can be {' or '.join([*a_number, *map(repr, values)])}"
    return f"There are: {', '.join(RayOptions.__struct_fields__)}"


def parse_options(given: Mapping[str, Any]) -> RayOptions:
    """Raises ConfigError for what is no option, or cannot be."""
    try:
        options = msgspec.convert(dict(given), RayOptions, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(f"backend_options of the ray backend: {error}. {_what_there_is(error)}.") from None
    cpus = (options.cpus_per_rank, options.cpus_per_engine, options.cpus_per_runner)
    gpus = (options.gpus_per_rank or 0, options.gpus_per_engine or 0)
    spread = options.vllm.tensor_parallel_size
    checks = {
        "engines must be 1 or more, or 'auto'": options.first_engines >= 1,
        "cpus and gpus cannot be negative": min(*cpus, *gpus) >= 0,
        "wait_seconds and start_seconds must be above 0": min(options.wait_seconds, options.start_seconds) > 0,
        "restarts cannot be negative": options.restarts >= 0,
        "sequence_parallel must be 1 or more": options.sequence_parallel >= 1,
        "sequence_parallel and offload are verl's, so they need learner='verl'": (
            options.learner != "own" or not options._needs_verl
        ),
        "vllm is of servers, so it needs engine='vllm'": options.engine == "vllm" or options.vllm == ServerOptions(),
        "gpus_per_engine must be tensor_parallel_size or more": (
            not options.gpus_per_engine or options.gpus_per_engine >= spread or spread == 1
        ),
        "object_store_memory is of a cluster that is started here, so with an address it would have no effect": (
            options.address is None or options.object_store_memory is None
        ),
    }
    if broken := [*options.vllm.wrong(), *(message for message, holds in checks.items() if not holds)]:
        raise ConfigError(f"backend_options of the ray backend: {'; '.join(broken)}.")
    return options
