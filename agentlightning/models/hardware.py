"""What computes: a small table of GPUs, and this machine's processor. For plans on paper; torch is not loaded.

Figures are those of the makers' data sheets: dense bfloat16 with float32 accumulation, and what `nvidia-smi` reports of
the memory, not what the box says.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from agentlightning.errors import ConfigError
from agentlightning.models.memory import memory_of

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device."""

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
