"""The Ray cluster of a run: what it is asked for, before the store is served at its address and runners are placed."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import Any

from agentlightning.algorithm.base import Algorithm
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend.ray.cluster import connected
from agentlightning.backend.ray.options import RayOptions, parse_options


def ray_options(algorithm: Algorithm) -> RayOptions:
    """The options of the algorithm's backend, if that is on Ray."""
    given: dict[str, Any] = {}
    if isinstance(algorithm, TrainingSettings) and algorithm.backend == "ray":
        given = dict(algorithm.backend_options)
    return parse_options(given)


async def connect_to_ray(stack: AsyncExitStack, algorithm: Algorithm, runners: int) -> str:
    """Connect until `stack` ends; this machine's address on the cluster. One that is started here has CPUs to count for
    so many runners beside the backend."""
    options = ray_options(algorithm)
    cpus = runners * options.cpus_per_runner
    if isinstance(algorithm, TrainingSettings) and algorithm.backend == "ray":
        cpus += options.cpus(algorithm.ranks)
    cluster = await stack.enter_async_context(connected(options, cpus=cpus))
    return cluster.host
