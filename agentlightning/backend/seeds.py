"""Seeds for requests that bring none, where several engines sample: each would draw what the others draw."""

from __future__ import annotations

import itertools
import zlib


class Seeds:
    """The same ones, in the same order, after the same `reseed`."""

    def __init__(self, seed: int | None) -> None:
        self.reseed(seed)

    def reseed(self, seed: int | None) -> None:
        self._seed = seed
        self._numbers = itertools.count()

    def next(self) -> int | None:
        if self._seed is None:
            return None
        return zlib.crc32(f"{self._seed}/{next(self._numbers)}".encode())
