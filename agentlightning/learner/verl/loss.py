"""Our losses in verl's engine: what is read of a pass over rows, and handed to `compute_loss`.

Shape letters: E loss entries of a worker's rows.
"""

# Nested tensors have more than pyright knows of.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from agentlightning.learner.base import LossConfig
from agentlightning.learner.loss import Entries, compute_loss

NOBODY = -1
"""The conversation of an entry that counts nothing, which a worker without rows has: losses are of some entries."""

SUM = "sum/"
"""What our sums are called among verl's own metrics."""


def row_loss(
    loss: LossConfig, model_output: Mapping[str, Tensor], data: Mapping[str, Any], dp_group: Any = None
) -> tuple[Tensor, dict[str, float]]:
    """What verl's engine calls after a pass. Metrics are sums over the entries, so that workers' can be added up."""
    at_E = entries_at(model_output["log_probs"], data["sources"])
    of: dict[str, Tensor] = {
        name: data[name].values() for name in ("old", "advantages", "weights", "sequence", "group")
    }
    entries = Entries(
        logprobs_E=model_output["log_probs"].values()[at_E],
        old_E=of["old"],
        advantages_E=of["advantages"],
        weights_E=of["weights"],
        sequence_E=of["sequence"],
        group_E=of["group"],
        entropy_E=model_output["entropy"].values()[at_E],
        reference_E=data["reference"].values() if loss.needs_reference else None,
    )
    value, metrics = compute_loss(entries, loss)
    total = metrics.pop("loss")
    count = float((entries.sequence_E != NOBODY).sum())
    sums = {name: mean * count for name, mean in metrics.items()} | {"total": total, "entries": count}
    named = {f"{SUM}{name}": value for name, value in sums.items()}
    # verl's ranks average their gradients; ours are parts of a sum.
    return value * data["dp_size"], named


def entries_at(of_tokens: Tensor, sources: Tensor) -> Tensor:
    """Where in the flat values of a nested tensor of rows each entry's source is."""
    return sources.values() + torch.repeat_interleave(of_tokens.offsets()[:-1], sources.offsets().diff())
