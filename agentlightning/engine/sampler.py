"""Drawing tokens from logits, for many requests with settings of their own in a few tensor operations.

Pure functions. A token is drawn by inverting the cumulative distribution at one uniform number per row, so a row's draw
depends on nothing but its own logits and number.

Shape letters: B rows, V vocabulary, F filtered rows, K tokens a filter keeps at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agentlightning.types.call import Float32Array, Int32Array


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of the rows, arrays of shape [B]; see `SamplingParams`."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row, with its log-probs under the distribution it was drawn from and under the plain softmax."""

    ids: Int32Array
    logprobs: Float32Array
    plain_logprobs: Float32Array
    distribution_BV: torch.Tensor
    """Plain log-probs of the whole vocabulary."""


def draw(logits_BV: torch.Tensor, settings: RowSettings, uniform_B: np.ndarray) -> Draw:
    """Draw one token per row.

    Plain log-probs are the softmax at the row's temperature (at 1 for greedy rows). A greedy row's log-prob under its
    own distribution is 0: nothing else could have been drawn.
    """
    greedy_B = settings.temperature == 0
    plain_BV = _plain(logits_BV.float(), settings.temperature, greedy_B)
    uniform = torch.from_numpy(uniform_B).to(plain_BV.device)
    ids_B = _invert(plain_BV.exp(), uniform)
    logprobs_B = plain_BV.gather(1, ids_B[:, None])[:, 0]
    filtered_B = ((settings.top_k > 0) | (settings.top_p < 1)) & ~greedy_B
    if filtered_B.any() or greedy_B.any():
        logprobs_B = logprobs_B.clone()
        _draw_filtered(plain_BV, settings, uniform, np.flatnonzero(filtered_B), ids_B, logprobs_B)
        _draw_greedy(plain_BV, np.flatnonzero(greedy_B), ids_B, logprobs_B)
        plain_B = plain_BV.gather(1, ids_B[:, None])[:, 0]
    else:
        plain_B = logprobs_B
    return Draw(
        ids=ids_B.to(torch.int32).cpu().numpy(),
        logprobs=logprobs_B.cpu().numpy(),
        plain_logprobs=plain_B.cpu().numpy(),
        distribution_BV=plain_BV,
    )


def alternatives(distribution_V: torch.Tensor, count: int) -> tuple[Int32Array, Float32Array]:
    """The `count` most probable tokens by falling probability: ids and plain log-probs, [count]."""
    top = distribution_V.topk(count)
    return top.indices.to(torch.int32).cpu().numpy(), top.values.cpu().numpy()


def _plain(logits_BV: torch.Tensor, temperature_B: np.ndarray, greedy_B: np.ndarray) -> torch.Tensor:
    if not (temperature_B == 1).all():
        scale_B = np.where(greedy_B, 1, temperature_B).astype(np.float32)
        logits_BV = logits_BV / torch.from_numpy(scale_B).to(logits_BV.device)[:, None]
    return torch.log_softmax(logits_BV, dim=-1)


def _invert(probs_BV: torch.Tensor, uniform_B: torch.Tensor) -> torch.Tensor:
    """The index at which the cumulative sum of each row passes its uniform number; the rows need not sum to 1."""
    cumulative_BV = probs_BV.cumsum(dim=-1)
    total_B = cumulative_BV[:, -1]
    # Rounding may lift the point onto the total; just below it, the index found has a probability above 0.
    point_B = torch.minimum(
        (uniform_B * total_B).to(total_B.dtype), torch.nextafter(total_B, torch.zeros_like(total_B))
    )
    index_B = torch.searchsorted(cumulative_BV, point_B[:, None], right=True)[:, 0]
    return index_B.clamp_(max=probs_BV.shape[-1] - 1)


def _draw_filtered(
    plain_BV: torch.Tensor,
    settings: RowSettings,
    uniform_B: torch.Tensor,
    rows: np.ndarray,
    ids_B: torch.Tensor,
    logprobs_B: torch.Tensor,
) -> None:
    """Draw the rows with top_k or top_p again, from what the filter leaves; top_k first, then top_p of the rest."""
    if not len(rows):
        return
    vocabulary = plain_BV.shape[-1]
    top_k = np.where(settings.top_k[rows] > 0, np.minimum(settings.top_k[rows], vocabulary), vocabulary)
    widest = int(top_k.max())
    index = torch.from_numpy(rows).to(plain_BV.device)
    sorted_FK, order_FK = plain_BV[index].topk(widest, dim=-1)
    probs_FK = sorted_FK.exp()
    limits_F = torch.from_numpy(top_k).to(index.device)
    probs_FK.masked_fill_(torch.arange(widest, device=index.device) >= limits_F[:, None], 0)
    before_FK = probs_FK.cumsum(dim=-1)
    top_p = torch.from_numpy(settings.top_p[rows]).to(probs_FK)
    mass_F = before_FK[:, -1].clone()
    before_FK -= probs_FK
    # A token stays if the more probable ones do not reach top_p; so the first always stays. top_p = 1 keeps all.
    beyond_FK = (before_FK >= (top_p * mass_F)[:, None]) & (top_p < 1)[:, None]
    beyond_FK[:, 0] = False
    probs_FK.masked_fill_(beyond_FK, 0)
    place_F = _invert(probs_FK, uniform_B[index])[:, None]
    ids_B[index] = order_FK.gather(1, place_F)[:, 0]
    logprobs_B[index] = sorted_FK.gather(1, place_F)[:, 0] - probs_FK.sum(dim=-1).log()


def _draw_greedy(plain_BV: torch.Tensor, rows: np.ndarray, ids_B: torch.Tensor, logprobs_B: torch.Tensor) -> None:
    """Take the most probable token of the greedy rows."""
    if not len(rows):
        return
    index = torch.from_numpy(rows).to(plain_BV.device)
    ids_B[index] = plain_BV[index].argmax(dim=-1)
    logprobs_B[index] = 0
