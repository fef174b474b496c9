"""What users set of the vLLM backend, with `backend_options`."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from agentlightning.errors import ConfigError, missing_extra


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server is started, wherever that is."""

    tensor_parallel_size: int = 1
    """GPUs that one server spreads the model over."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that a server takes."""
    args: tuple[str, ...] = ()
    """More arguments of `vllm serve`."""
    env: dict[str, str] = {}
    """More variables of its environment."""
    command: str | None = None
    """The `vllm` to start, for one in an environment of its own; None: the one beside this Python, or on the path."""

    def wrong(self) -> list[str]:
        """What cannot be."""
        checks = {
            "tensor_parallel_size must be 1 or more": self.tensor_parallel_size >= 1,
            "gpu_memory_utilization must be above 0 and at most 1": 0 < self.gpu_memory_utilization <= 1,
        }
        return [message for message, holds in checks.items() if not holds]


class VLLMOptions(ServerOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Each is a key of `backend_options`."""

    replicas: int = 1
    """Servers that are started; each holds the whole model."""
    urls: tuple[str, ...] = ()
    """Base URLs of servers that run already, on this machine or with its folders; then none is started."""
    api_key: str | None = None
    """Of the servers. None: servers of ours have one that nobody else knows."""
    gpu_memory_utilization: float = 0.45
    """The learner needs the rest of the GPU that it shares with a server."""
    devices: tuple[str, ...] = ()
    """For each replica the value of CUDA_VISIBLE_DEVICES, for example ("1", "2"); empty: they see all."""
    start_seconds: float = 1800.0
    """How long a server may take to load the model."""
    restarts: int = 3
    """How often in a row a server that dies is started again, before the run is stopped."""
    exchange: str | None = None
    """Folder through which weights get across; None: shared memory where there is some, else the folder for temporary
    files."""
    weight_transfer: Literal["files", "gloo", "nccl"] = "files"
    """How weights get to the servers: they read the learner's files; or they are sent them, all at once, by broadcasts
    of torch.distributed over "gloo" or "nccl"."""


def parse_options(given: Mapping[str, Any]) -> VLLMOptions:
    """Raises ConfigError for what is no option, or one that would have no effect."""
    try:
        options = msgspec.convert(dict(given), VLLMOptions, strict=True)
    except msgspec.ValidationError as error:
        known = ", ".join(VLLMOptions.__struct_fields__)
        raise ConfigError(f"backend_options of the vllm backend: {error}. There are: {known}.") from None
    checks = {
        "replicas must be 1 or more": options.replicas >= 1,
        "devices must name as many as there are replicas": len(options.devices) in (0, options.replicas),
        "urls must begin with http:// or https://": all(u.startswith(("http://", "https://")) for u in options.urls),
    }
    if options.urls:
        ours = [n for n in _OF_OUR_SERVERS if getattr(options, n) != _DEFAULTS[n]]
        checks[f"with urls no server is started, so {', '.join(ours)} would have no effect"] = not ours
    if broken := [*options.wrong(), *(message for message, holds in checks.items() if not holds)]:
        raise ConfigError(f"backend_options of the vllm backend: {'; '.join(broken)}.")
    return options


_OF_OUR_SERVERS = (
    "replicas", "tensor_parallel_size", "gpu_memory_utilization", "devices", "args", "env", "command", "restarts",
)  # fmt: skip
_DEFAULTS: Mapping[str, Any] = msgspec.structs.asdict(VLLMOptions())


def find_vllm(command: str | None) -> str:
    """The program that is started. Raises ConfigError where there is none."""
    if command is not None:
        found = shutil.which(command)
        if found is None:
            raise ConfigError(f"backend_options: there is no program '{command}' to start vLLM with.")
        return found
    installed = Path(sys.executable).with_name("vllm")
    found = str(installed) if installed.is_file() else shutil.which("vllm")
    if found is None:
        hint = missing_extra("vllm", "vllm")
        raise ConfigError(
            f"{hint}\nOr install vLLM in an environment of its own, and name its program: "
            "backend_options={'command': '/path/to/env/bin/vllm'}; or give urls of servers that run."
        )
    return found


_SHARED_MEMORY = Path("/dev/shm")


def shared_memory() -> str | None:
    """The folder in this machine's memory; None where there is none."""
    return str(_SHARED_MEMORY) if _SHARED_MEMORY.is_dir() else None
