"""How verl's layer is spread over processes: settings for the process that drives it."""

from __future__ import annotations

import msgspec


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Of the workers that learn."""

    workers: int = 1
    """Processes, each with a share of weights, gradients and optimiser."""
    sequence_parallel: int = 1
    """So many workers share each row (Ulysses: Jacobs et al., arXiv 2309.14509)."""
    offload: bool = False
    """Keep weights and optimiser in the machine's memory while a GPU does not compute with them."""
    cpus: float = 1.0
    """That Ray counts for each."""
    gpus: float = 0.0
    """Of each; 0: it computes on CPUs."""
