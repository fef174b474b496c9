"""Memory that is there where it was written, and can be given back in parts: pages of the operating system.

The cache's tensors keep their plain layout, so that attention reads them as views, and memory follows what is written
(as Prabhu et al., vAttention, arXiv 2405.04437, do on GPUs). Linux only: elsewhere pages do not come back as zeros.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterable
from contextlib import suppress

import torch

SUPPORTED = sys.platform == "linux"
LARGEST_BLOCK = 256
SMALLEST_BLOCK = 16
"""Tokens."""
_NORESERVE = 0x4000  # not among Python's names: addresses alone are asked for, more than there is memory


class MemoryPages:
    """Zeros at new addresses. Raises OSError where the system does not hand out so many."""

    def __init__(self, size: int) -> None:
        self._area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
        with suppress(OSError):  # a kernel without huge pages, which would be taken for a few tokens
            self._area.madvise(mmap.MADV_NOHUGEPAGE)

    def tensor(self, size: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """All of it as a tensor, which keeps it."""
        return torch.frombuffer(self._area, dtype=dtype).view(size)

    def give_back(self, start: int, size: int) -> None:
        """Free the pages of these bytes, which read as zeros from now on. Both are multiples of a page."""
        self._area.madvise(mmap.MADV_DONTNEED, start, size)


def block_tokens(row_bytes: Iterable[int]) -> int | None:
    """The smallest number of tokens that fill whole pages in every layer; None where that would be too many."""
    whole = math.lcm(SMALLEST_BLOCK, *(mmap.PAGESIZE // math.gcd(size, mmap.PAGESIZE) for size in row_bytes))
    return whole if whole <= LARGEST_BLOCK else None
