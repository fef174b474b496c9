"""Whether verl is here, and what its tests' processes are told."""

from __future__ import annotations

import os
from importlib.util import find_spec

WHY_NOT = None if find_spec("verl") else "verl is tested by `make test-verl`, in an environment of its own"
ENVIRONMENT = {
    **os.environ,
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
}
