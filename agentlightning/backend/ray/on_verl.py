"""verl's workers as the ranks of the learner: what they cannot do is refused, and what their driver is told.

The driver is a model process on the cluster as any other; it computes on the CPU, and does not count as a rank.
"""

from __future__ import annotations

import msgspec

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.embedded.protocol import Settings
from agentlightning.backend.ray.options import RayOptions
from agentlightning.errors import ConfigError
from agentlightning.learner.verl.sizes import Sizes

PRECISIONS = ("float32", "bfloat16")


def refuse_for_verl(spec: ModelSpec, options: RayOptions) -> None:
    """Raises ConfigError for what rows through verl's workers cannot do, with what to change."""
    own = "or take learner='own'."
    checks = {
        f"train all weights: leave lora_rank and policies out, {own}": not (spec.lora_rank or spec.adapters),
        f"have no critic: take credit='broadcast', {own}": not spec.critic,
        f"compute in {' or '.join(PRECISIONS)}: set dtype, {own}": spec.dtype in PRECISIONS,
        f"share a row among {options.sequence_parallel}: let ranks be a multiple of sequence_parallel.": (
            spec.ranks % options.sequence_parallel == 0
        ),
        "share a row on GPUs only (FlashAttention): leave sequence_parallel out, or device='cpu'.": (
            options.sequence_parallel == 1 or spec.device != "cpu"
        ),
        "offload by an option of the backend's: set backend_options={'offload': True}, and leave the setting out.": (
            not spec.offload
        ),
        "have nothing to offload from a CPU: leave offload out, or device='cpu'.": (
            not options.offload or spec.device != "cpu"
        ),
    }
    for words, holds in checks.items():
        if not holds:
            raise ConfigError(f"verl's workers {words}")


def driver_settings(settings: Settings, options: RayOptions, gpus: float) -> Settings:
    """What the process that drives the workers is told."""
    sizes = Sizes(
        workers=settings.ranks,
        sequence_parallel=options.sequence_parallel,
        offload=options.offload,
        cpus=options.cpus_per_rank,
        gpus=gpus,
    )
    return msgspec.structs.replace(settings, device="cpu", ranks=1, verl=sizes)
