"""A trial of a model before it learns: a small forest, as trees and as rows, against the model's own forward.

The reference is one plain forward per path through the model's own head, so none of this package's passes stands on
both sides. Models are code of others: what they raise on the way is an answer, too.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec
import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agentlightning.learner.base import LearnerOptions, PackedBatch
from agentlightning.learner.forward import Scores, as_long, leaf_rows, score, takes_flex
from agentlightning.learner.optimizer import whole

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
"""Largest relative error between two passes that compute the same, by dtype."""
HALF_TOLERANCE = 0.1

_LENGTHS, _PARENTS = (4, 1, 2, 5, 6), (-1, 0, 1, 0, -1)
"""Segments of the forest that is tried, and below which other one each stands. What stands on the single token sees
past it, and siblings have other lengths."""


def tolerance(model: PreTrainedModel) -> float:
    """The largest relative error that counts as rounding."""
    return TOLERANCE.get(model.dtype, HALF_TOLERANCE)


def try_trees(model: PreTrainedModel, options: LearnerOptions) -> tuple[LearnerOptions, str | None]:
    """How this model computes trees, and why it cannot compute them, None if it can: where FlexAttention does not work
    here, segments do."""
    reason = why_not(model, options, rows=False)
    if reason is None or not takes_flex(options, model.device):
        return options, reason
    segments = msgspec.structs.replace(options, tree_attention="segments")
    without = why_not(model, segments, rows=False)
    if without is None:
        logger.warning("Token trees are computed segment by segment, without FlexAttention: %s.", reason.rstrip("."))
    return segments, without


def why_not(model: PreTrainedModel, options: LearnerOptions, *, rows: bool) -> str | None:
    """Why trees (or their rows) of this model have other log-probs or gradients than its own forward; None if not."""
    batch = _small_forest(model.get_input_embeddings().num_embeddings)  # pyright: ignore
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        expected_E = _plain(model, batch)
        expected = _gradients(expected_E, parameters)
        try:
            found_E = score(model, batch, options, rows=rows).logprobs_E
            found = _gradients(found_E, parameters)
        except Exception as error:
            logger.debug("A trial failed", exc_info=True)
            return (str(error).strip().splitlines() or [type(error).__name__])[0]
    gap = float((found_E - expected_E).detach().abs().max())
    if not relative_error(found_E.detach(), expected_E.detach()) <= tolerance(model):
        return f"its log-probs differ by {gap:.2g} from those of its own forward"
    if not worst_error(found, expected) <= tolerance(model):
        return "its gradients differ from those of its own forward"
    return None


def measure(
    model: PreTrainedModel, options: LearnerOptions, inside: Callable[[Callable[[], Scores]], Scores] | None = None
) -> tuple[Tensor, Tensor]:
    """Log-probs of the forest, [E], and the norm of each trained tensor's gradient: what does not depend on how a model
    is spread. `inside`: what all computing has to be done in."""
    batch = _small_forest(model.get_input_embeddings().num_embeddings)  # pyright: ignore
    parameters = [p for p in model.parameters() if p.requires_grad]
    with torch.enable_grad():
        logprobs_E = (inside or (lambda work: work()))(lambda: score(model, batch, options, rows=False)).logprobs_E
        _weighted(logprobs_E).backward()
    norms = [0.0 if p.grad is None else float(whole(torch.linalg.vector_norm(p.grad))) for p in parameters]
    for parameter in parameters:
        parameter.grad = None
    return logprobs_E.detach(), torch.tensor(norms)


def _small_forest(vocabulary: int) -> PackedBatch:
    """Two trees with a few branches; every token but the roots' first is to be predicted once."""
    starts_S = np.cumsum((0, *_LENGTHS[:-1]))
    depth_S = [0] * len(_LENGTHS)
    for s, parent in enumerate(_PARENTS):
        depth_S[s] = 0 if parent < 0 else depth_S[parent] + _LENGTHS[parent]
    positions_N = np.concatenate([depth + np.arange(n) for depth, n in zip(depth_S, _LENGTHS, strict=True)])
    ids_N = np.random.default_rng(0).integers(0, vocabulary, len(positions_N))
    before_N = np.arange(-1, len(ids_N) - 1)
    for start, parent in zip(starts_S, _PARENTS, strict=True):
        before_N[start] = starts_S[parent] + _LENGTHS[parent] - 1 if parent >= 0 else -1
    targets = np.flatnonzero(before_N >= 0)
    numbers_E = np.arange(len(targets))
    ones_E = np.ones(len(targets), dtype=np.float32)
    return PackedBatch(
        ids_N=ids_N.astype(np.int32),
        positions_N=positions_N.astype(np.int32),
        starts_S=starts_S.astype(np.int32),
        parents_S=np.array(_PARENTS, dtype=np.int32),
        source_E=before_N[targets].astype(np.int32),
        targets_E=ids_N[targets].astype(np.int32),
        sequence_E=numbers_E.astype(np.int32),
        group_E=numbers_E.astype(np.int32),
        old_logprobs_E=0 * ones_E,
        advantages_E=ones_E,
        weights_E=ones_E,
        temperature_E=ones_E,
    )


def _plain(model: PreTrainedModel, batch: PackedBatch) -> Tensor:
    """Log-probs of the targets, [E], each path alone through the whole model."""
    logprobs_E: list[Tensor | None] = [None] * len(batch.targets_E)
    for nodes_L, entries in leaf_rows(batch):
        logits_LV = model(input_ids=as_long(batch.ids_N[nodes_L], model.device)[None], use_cache=False).logits[0]
        table_LV = logits_LV.to(torch.promote_types(logits_LV.dtype, torch.float32)).log_softmax(-1)
        for entry in entries.tolist():
            logprobs_E[entry] = table_LV[int(batch.positions_N[batch.source_E[entry]]), int(batch.targets_E[entry])]
    return torch.stack([value for value in logprobs_E if value is not None])


def _weighted(logprobs_E: Tensor) -> Tensor:
    """Their sum; not all tokens alike, so that errors of two of them do not cancel out."""
    weights_E = torch.linspace(0.5, 1.5, len(logprobs_E), dtype=logprobs_E.dtype, device=logprobs_E.device)
    return (logprobs_E * weights_E).sum()


def _gradients(logprobs_E: Tensor, parameters: list[torch.nn.Parameter]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(_weighted(logprobs_E), parameters, allow_unused=True, materialize_grads=True)


def worst_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """The largest relative error over all tensors of gradients."""
    # Some gradients are nothing but rounding (of a bias that softmax cancels out): they are measured by the others.
    least = 1e-3 * max(float(g.abs().max()) for g in expected)
    return max(relative_error(a, b, least) for a, b in zip(found, expected, strict=True))


def relative_error(a: Tensor, b: Tensor, least: float = 0.0) -> float:
    """The largest difference, relative to the largest value of either, or to `least` if that is more."""
    scale = max(float(a.abs().max()), float(b.abs().max()), least, 1e-12)
    return float((a - b).abs().max()) / scale
