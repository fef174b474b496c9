"""Random identifiers. Unique, not secret: keys are made in `keys`."""

from __future__ import annotations

import os
import random

_random = random.Random(os.urandom(32))
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _random.seed(os.urandom(32)))


def random_hex(size: int) -> str:
    """`size` random bytes as lower-case hexadecimal digits. Asks the system once per process, not once per id."""
    return f"{_random.getrandbits(8 * size):0{2 * size}x}"
