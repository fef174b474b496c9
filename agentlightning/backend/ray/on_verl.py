"""verl's workers as the ranks of the learner: what they cannot do is refused, and what their driver is told.

The driver is a model process on the cluster as any other; it computes on the CPU, and does not count as a rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from agentlightning.backend.base import ModelSpec
from agentlightning.backend.embedded.protocol import ProcessSettings
from agentlightning.backend.ray.options import RayOptions
from agentlightning.errors import ConfigError
from agentlightning.learner.verl.sizes import Sizes

PRECISIONS = ("float32", "bfloat16")


def refuse_for_verl(spec: ModelSpec, options: RayOptions) -> None:
    """Raises ConfigError for what rows through verl's workers cannot do, with what to change."""
    own = "or take learner='own'."
    checks = {
        f"train one policy: leave policies out, {own}": not spec.adapters,
        f"keep layers whole: leave tensor_parallel out, {own}": spec.tensor_parallel == 1,
        f"have no critic: take credit='broadcast', {own}": not spec.critic,
        f"compute in {' or '.join(PRECISIONS)}: set dtype, {own}": spec.dtype in PRECISIONS,
        f"share a row among {options.sequence_parallel}: let ranks be a multiple of sequence_parallel.": (
            spec.ranks % options.sequence_parallel == 0
        ),
        "offload by an option of the backend's: set backend_options={'offload': True}, and leave the setting out.": (
            not spec.offload
        ),
    }
    refuse(checks)


def refuse(checks: Mapping[str, bool]) -> None:
    for words, holds in checks.items():
        if not holds:
            raise ConfigError(f"verl's workers {words}")


def driver_settings(settings: ProcessSettings, options: RayOptions, gpus: float) -> ProcessSettings:
    """What the process that drives the workers is told. Raises ConfigError for what they cannot do on these devices."""
    flash = (
        "share a row on GPUs in bfloat16 only (FlashAttention): set dtype='bfloat16', or leave sequence_parallel out."
    )
    refuse(
        {
            flash: not gpus or options.sequence_parallel == 1 or settings.dtype == "bfloat16",
            "have nothing to offload from a CPU: leave offload out.": bool(gpus) or not options.offload,
        }
    )
    sizes = Sizes(
        workers=settings.ranks,
        sequence_parallel=options.sequence_parallel,
        offload=options.offload,
        cpus=options.cpus_per_rank,
        gpus=gpus,
    )
    return msgspec.structs.replace(settings, device="cpu", ranks=1, verl=sizes)
