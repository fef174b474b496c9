"""Rows as verl's `TensorDict`, and what it says of them as values of our entries."""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils

from agentlightning.learner.base import PackedBatch
from agentlightning.learner.verl.loss import NOBODY, SUM, entries_at
from agentlightning.learner.verl.rows import Pass, Row
from agentlightning.types.call import Float32Array

NO_ENTRY = {"old": 0.0, "advantages": 0.0, "weights": 0.0, "reference": 0.0, "sequence": NOBODY, "group": NOBODY}


def tensors_of(
    one: Pass, batch: PackedBatch, extra: Mapping[str, Any] | None = None, *, reference_E: Float32Array | None = None
) -> TensorDict:
    """The rows of all workers, in their order; `extra`: further fields for the engine."""
    of_entries = {
        "old": batch.old_logprobs_E,
        "advantages": batch.advantages_E,
        "weights": batch.weights_E,
        "sequence": batch.sequence_E,
        "group": batch.group_E,
    }
    if reference_E is not None:
        of_entries["reference"] = reference_E
    rows = [row for part in one for row in part]
    idle = {number * len(part) for number, part in enumerate(one) if not any(len(row.entries_R) for row in part)}
    tensors: dict[str, Any] = {
        "input_ids": _nested([row.ids_L.astype(np.int64) for row in rows]),
        "position_ids": _nested([np.arange(len(row.ids_L)) for row in rows]),
        "loss_mask": _nested([_learned(row) for row in rows]),
        "temperature": torch.tensor([row.temperature for row in rows], dtype=torch.float32),
        "sources": _nested([np.zeros(1, np.int64) if n in idle else row.sources_R for n, row in enumerate(rows)]),
    }
    for name, values_E in of_entries.items():
        nothing = np.array([NO_ENTRY[name]], dtype=values_E.dtype)
        tensors[name] = _nested([nothing if n in idle else values_E[row.entries_R] for n, row in enumerate(rows)])
    meta = {"calculate_entropy": True, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(one[0])}
    return tensordict_utils.get_tensordict(tensors, {**meta, **(extra or {})})


def sums_in(found: TensorDict) -> dict[str, float]:
    """What `row_loss` summed on each worker, added up."""
    metrics: dict[str, Any] = tensordict_utils.get(found, "metrics")
    return {name.removeprefix(SUM): float(np.sum(values)) for name, values in metrics.items() if name.startswith(SUM)}


def put(logprobs_E: Float32Array, one: Pass, of_tokens: Tensor) -> None:
    """Write what was found of the rows' tokens where the entries are."""
    rows = [row for part in one for row in part]
    at = entries_at(of_tokens, _nested([row.sources_R for row in rows]))
    entries = np.concatenate([row.entries_R for row in rows])
    logprobs_E[entries] = of_tokens.values()[at].float().cpu().numpy()


def _learned(row: Row) -> np.ndarray:
    """1 at the tokens that are targets."""
    mask_L = np.zeros(len(row.ids_L), dtype=np.int64)
    mask_L[row.sources_R + 1] = 1
    return mask_L


def _nested(arrays: list[np.ndarray]) -> Tensor:
    return torch.nested.as_nested_tensor([torch.from_numpy(a) for a in arrays], layout=torch.jagged)
