"""Whether a model that is to be trained fits, before minutes are spent on loading it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from agentlightning.errors import ModelError
from agentlightning.models.shape import ModelShape

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")
_LORA_RANK = 16
_CACHE_BYTES = 2 << 30
_CACHE_SHARE = 0.2


def refuse_what_does_not_fit(
    model: str, shape: ModelShape, *, dtype: str, device: str, adapter: bool, trains: bool = True, offload: bool = False
) -> None:
    """Raises ModelError with the sum, and with what would fit, for a model that is too big for this machine."""
    memory, what = memory_of(device)
    if memory is None:
        return
    need = _bytes(shape, dtype, adapter=adapter, trains=trains, offload=offload)
    if need <= memory:
        return
    others = {
        f"lora_rank={_LORA_RANK}": _bytes(shape, dtype, adapter=True, trains=trains),
        f"lora_rank={_LORA_RANK}, dtype='bfloat16'": _bytes(shape, "bfloat16", adapter=True, trains=trains),
    }
    fitting = [f"{setting} takes {_gib(size)}" for setting, size in others.items() if size <= memory]
    weights = "its frozen weights" if adapter or shape.adapter else "weights, gradients and AdamW's two moments"
    raise ModelError(
        f"The model '{model}' does not fit: its {shape.parameters / 1e9:.1f} billion parameters take {_gib(need)} in "
        f"{dtype} ({weights if trains else 'its weights'}; activations and contexts come on top), and {what} has "
        f"{_gib(memory)}. {'; '.join(fitting) + '.' if fitting else 'Take a smaller model, or a larger machine.'}"
    )


def cache_bytes(free: int | None) -> int:
    """Bytes that the embedded engine takes for contexts: 2 GiB, or a fifth of what weights, gradients and optimiser
    leave `free` on a CUDA GPU, whichever is more. `free` is None on other devices."""
    return _CACHE_BYTES if free is None else max(_CACHE_BYTES, int(free * _CACHE_SHARE))


def memory_of(device: str) -> tuple[int | None, str]:
    """Bytes that are there for a model, and where; None where that cannot be found out."""
    if not device.startswith("cpu"):
        gpu = _gpu_memory()
        if gpu is not None or device.startswith("cuda"):
            return gpu, "the GPU"
    return _free_memory(), "this machine"


def _bytes(shape: ModelShape, dtype: str, *, adapter: bool, trains: bool, offload: bool = False) -> int:
    return shape.training_bytes(dtype, adapter=adapter or not trains, offload=offload)


def _gpu_memory() -> int | None:
    """The memory of the first GPU, by NVIDIA's own tool: torch is not loaded in this process."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    query = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        return int(done.stdout.split()[0]) << 20
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _free_memory() -> int | None:
    """What the kernel says is available, within the limit of the container; all there is where it does not say, as on
    a Mac, whose GPU shares it."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return _whole_memory()
    free = next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable")), None)
    try:
        limit, used = ((_CGROUP / f"memory.{name}").read_text().strip() for name in ("max", "current"))
        return min(free or int(limit), int(limit) - int(used))
    except (OSError, ValueError):  # no container, or one without a limit
        return free


def _whole_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # Windows
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
