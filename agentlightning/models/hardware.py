"""What computes: a small table of GPUs, and this machine's processor; for plans on paper, and to refuse a model that
does not fit before minutes are spent on loading it. Torch is not loaded.

Figures are those of the makers' data sheets: dense bfloat16 with float32 accumulation, and of the memory what
`nvidia-smi` reports, not what the box says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agentlightning.errors import ConfigError, ModelError
from agentlightning.models.shape import ModelShape

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """A device that computes."""

    name: str
    memory: int
    """Bytes."""
    flops: float
    """Multiplications and additions per second, in the type that weights are trained in there."""
    bandwidth: float
    """Bytes per second to and from its memory."""

    @property
    def is_gpu(self) -> bool:
        """Whether vLLM runs on it at its own speed."""
        return self.name in GPUS


def _gpu(name: str, gib: float, teraflops: float, gigabytes: float) -> Hardware:
    return Hardware(name, int(gib * GIB), teraflops * 1e12, gigabytes * 1e9)


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("A10", 22.0, 125, 600),
        _gpu("L4", 22.0, 121, 300),
        _gpu("RTX3090", 23.5, 71, 936),
        _gpu("RTX4090", 23.5, 165, 1008),
        _gpu("A100-40", 39.4, 312, 1555),
        _gpu("L40S", 44.4, 362, 864),
        _gpu("A100-80", 79.1, 312, 2039),
        _gpu("H100", 79.1, 989, 3350),
        _gpu("H200", 139.8, 989, 4800),
        _gpu("B200", 178.3, 2250, 8000),
        _gpu("MI300X", 191.5, 1307, 5300),
    )
}
"""By name, from the smallest memory to the largest."""


def devices(text: str | None) -> tuple[Hardware, int]:
    """`4xH100`, `H100`, or `cpu` → a device and how many of it. None: what this machine has.

    Raises ConfigError for a GPU that is not in the table.
    """
    if text is None:
        return _here()
    if text.lower() in ("cpu", "none", "0"):
        return this_cpu(), 1
    found = re.fullmatch(r"(?:(\d+)\s*[x×*:]\s*)?([A-Za-z][\w-]*)", text.strip())
    names = {_plain(name): name for name in GPUS} | {"a100": "A100-80"}
    if found is None or _plain(found[2]) not in names or int(found[1] or 1) < 1:
        near = [] if found is None else [plain for plain in names if _plain(found[2]).startswith(plain)]
        meant = f" Did you mean {names[max(near, key=len)]}?" if near else ""
        raise ConfigError(
            f"--gpus is {text!r}; it takes a number and a name, for example 4xH100, or cpu.{meant} Known are "
            f"{', '.join(GPUS)}."
        )
    return GPUS[names[_plain(found[2])]], int(found[1] or 1)


def this_cpu() -> Hardware:
    """This machine's processor, measured for a quarter of a second: one product of matrices, one copy of memory."""
    memory, _ = memory_of("cpu")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    flops, bandwidth = _measured()
    return Hardware(f"this CPU ({cores} cores)", memory or 8 * GIB, flops, bandwidth)


def _here() -> tuple[Hardware, int]:
    """The GPUs that `nvidia-smi` names, where the table has them; else the processor."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        query = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
        try:
            done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            return this_cpu(), 1
        lines = [line.rsplit(",", 1) for line in done.stdout.splitlines() if "," in line]
        if lines:
            gib = int(lines[0][1]) / 1024
            named = [gpu for gpu in GPUS.values() if _plain(gpu.name.split("-")[0]) in _plain(lines[0][0])]
            if named:
                return min(named, key=lambda gpu: abs(gpu.memory / GIB - gib)), len(lines)
    return this_cpu(), 1


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


def _measured() -> tuple[float, float]:
    """Multiplications and additions, and bytes, per second: the best of a few tries, as other programs run too.

    numpy's own products take all cores, as torch's do. Where numpy is not installed, a modest core is assumed.
    """
    try:
        import numpy as np
    except ImportError:
        return 5e10, 1e10
    size = 768
    a, b = np.ones((size, size), dtype=np.float32), np.ones(1 << 24, dtype=np.float32)
    _ = a @ a
    product = min(_seconds(lambda: a @ a) for _ in range(5))
    copied = min(_seconds(b.copy) for _ in range(3))
    return 2 * size**3 / product, 2 * b.nbytes / copied


def _seconds(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


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
    """Bytes that a model may take, and where they are; None where that cannot be found out."""
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
    """The memory that the kernel reports as available, within the limit of the container; all memory where it reports
    nothing, as on a Mac, whose GPU shares it."""
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
