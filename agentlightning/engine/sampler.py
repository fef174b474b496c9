"""Drawing tokens from logits, for many requests with settings of their own in a few tensor operations.

Pure functions. A token is drawn by inverting the cumulative distribution at one uniform number per row, so a row's draw
depends on nothing but its own logits and number.

Shape letters: B rows, V vocabulary, F filtered rows, K tokens a filter keeps at most; 1 is a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch

from agentlightning.types.arrays import MOST_KEPT
from agentlightning.types.call import Float32Array, Int32Array

_BELOW_ONE = 1 - 2**-23
_NONE = np.empty(0, dtype=np.int32)
CANDIDATES = 512
"""Tokens that are sorted for a row whose filter names no number of them; more only if these do not reach far enough."""


@dataclass(frozen=True, slots=True)
class RowSettings:
    """Sampling settings of the rows, arrays of shape [B]; see `SamplingParams`."""

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    min_p: np.ndarray


@dataclass(frozen=True, slots=True)
class Draw:
    """One token per row, with its log-probs under the distribution it was drawn from and under the plain softmax."""

    ids: Int32Array
    logprobs: Float32Array
    plain_logprobs: Float32Array
    distribution_BV: torch.Tensor
    """Plain log-probs of the whole vocabulary."""
    kept: Mapping[int, Int32Array] = field(default_factory=dict)
    """By row, the tokens that top_k, top_p and min_p left to draw from, where they were asked for: the distribution
    that it was drawn from is the plain one over these."""


def draw(
    logits_BV: torch.Tensor,
    settings: RowSettings,
    uniform_B: np.ndarray,
    allowed: Mapping[int, torch.Tensor] | None = None,
    shifts: Mapping[int, torch.Tensor] | None = None,
    keeps: np.ndarray | None = None,
) -> Draw:
    """Draw one token per row. `allowed` are the tokens that may be drawn, bool [V], for rows with a grammar; `shifts`
    is what is added to the logits, [V], for rows with penalties or a bias. `keeps` are the rows, bool [B], of which to
    say what a filter left; nothing is said of those with shifts, or with more than `MOST_KEPT` tokens left.

    Plain log-probs are the softmax at the row's temperature (at 1 for greedy rows). A greedy row's log-prob under its
    own distribution is 0: nothing else could have been drawn.
    """
    greedy_B = settings.temperature == 0
    filtered_B = (settings.top_k > 0) | (settings.top_p < 1) | (settings.min_p > 0)
    plain_BV = shown_BV = _plain(logits_BV.float(), settings.temperature, greedy_B)
    if allowed or shifts:
        shown_BV = plain_BV.clone()
        for row, shift_V in (shifts or {}).items():
            scale = 1.0 if greedy_B[row] else float(settings.temperature[row])
            shown_BV[row] = torch.log_softmax(plain_BV[row] + shift_V.to(plain_BV.device) / scale, dim=-1)
            filtered_B[row] = True
        for row, mask_V in (allowed or {}).items():
            shown_BV[row].masked_fill_(~mask_V.to(shown_BV.device), -torch.inf)
            filtered_B[row] = True
    filtered_B &= ~greedy_B
    # In float32 a number may round up to 1, beyond the last token; just below it is as good.
    uniform_B1 = torch.from_numpy(np.minimum(uniform_B, _BELOW_ONE).astype(np.float32)[:, None]).to(plain_BV.device)
    ids_B1 = _invert(plain_BV.exp(), uniform_B1)
    logprobs_B1 = plain_B1 = plain_BV.gather(1, ids_B1)
    kept: dict[int, Int32Array] = {}
    if filtered_B.any() or greedy_B.any():
        wanted = () if keeps is None else np.flatnonzero(keeps & filtered_B).tolist()
        kept = {row: _NONE for row in wanted if row not in (shifts or {})}
        _draw_filtered(shown_BV, settings, uniform_B1, np.flatnonzero(filtered_B), ids_B1, logprobs_B1, kept)
        _draw_greedy(shown_BV, np.flatnonzero(greedy_B), ids_B1, logprobs_B1)
        plain_B1 = plain_BV.gather(1, ids_B1)
    return Draw(
        ids=ids_B1.cpu().numpy()[:, 0].astype(np.int32),
        logprobs=logprobs_B1.cpu().numpy()[:, 0],
        plain_logprobs=plain_B1.cpu().numpy()[:, 0],
        distribution_BV=plain_BV,
        kept={row: ids for row, ids in kept.items() if 0 < len(ids) <= MOST_KEPT},
    )


def alternatives(distribution_V: torch.Tensor, count: int) -> tuple[Int32Array, Float32Array]:
    """The `count` most probable tokens by falling probability: ids and plain log-probs, [count]."""
    top = distribution_V.topk(count)
    return top.indices.to(torch.int32).cpu().numpy(), top.values.cpu().numpy()


def _plain(logits_BV: torch.Tensor, temperature_B: np.ndarray, greedy_B: np.ndarray) -> torch.Tensor:
    if (temperature_B != 1).any():
        scale_B = np.where(greedy_B, 1, temperature_B).astype(np.float32)
        logits_BV = logits_BV / torch.from_numpy(scale_B).to(logits_BV.device)[:, None]
    return torch.log_softmax(logits_BV, dim=-1)


def _invert(probs_BV: torch.Tensor, uniform_B1: torch.Tensor) -> torch.Tensor:
    """Where the cumulative sum of each row passes its number's share of the total, [B, 1]; rows need not sum to 1.

    The token that is found has a probability above 0.
    """
    cumulative_BV = probs_BV.cumsum(dim=-1)
    index_B1 = torch.searchsorted(cumulative_BV, uniform_B1 * cumulative_BV[:, -1:], right=True)
    return index_B1.clamp_(max=probs_BV.shape[-1] - 1)  # beyond the end only where there are NaN


def _draw_filtered(
    shown_BV: torch.Tensor,
    settings: RowSettings,
    uniform_B1: torch.Tensor,
    rows: np.ndarray,
    ids_B1: torch.Tensor,
    logprobs_B1: torch.Tensor,
    kept: dict[int, Int32Array],
) -> None:
    """Draw the filtered rows again, from what is left of the shifted logits: the grammar's tokens, of these top_k,
    top_p of the rest, and of that what min_p leaves.

    Only the most probable tokens are sorted where a row says no more; a row for which they are too few is drawn again
    from all of them, so the result is that of sorting everything. What is left goes into `kept` for the rows in it.
    """
    cut = (settings.top_k[rows] > 0) | (settings.top_p[rows] < 1) | (settings.min_p[rows] > 0)
    if len(whole := rows[~cut]):
        index = torch.from_numpy(whole).to(shown_BV.device)
        probs_FV = shown_BV[index].exp()
        ids_B1[index] = _invert(probs_FV, uniform_B1[index])
        logprobs_B1[index] = shown_BV[index].gather(1, ids_B1[index]) - probs_FV.sum(dim=-1, keepdim=True).log()
    rows, width = rows[cut], CANDIDATES
    while len(rows):
        enough = _draw_sorted(shown_BV, settings, uniform_B1, rows, width, ids_B1, logprobs_B1, kept)
        rows, width = rows[~enough], 16 * width


def _draw_sorted(
    shown_BV: torch.Tensor,
    settings: RowSettings,
    uniform_B1: torch.Tensor,
    rows: np.ndarray,
    width: int,
    ids_B1: torch.Tensor,
    logprobs_B1: torch.Tensor,
    kept: dict[int, Int32Array],
) -> np.ndarray:
    """Draw these rows from their `width` most probable tokens (or top_k, if that is more); for which it was enough."""
    vocabulary, index = shown_BV.shape[-1], torch.from_numpy(rows).to(shown_BV.device)
    top_k = np.where(settings.top_k[rows] > 0, np.minimum(settings.top_k[rows], vocabulary), vocabulary)
    width = min(max(width, int(np.where(top_k < vocabulary, top_k, 0).max())), vocabulary)
    shown_FV = shown_BV[index]
    sorted_FK, order_FK = shown_FV.topk(width, dim=-1)
    probs_FK = sorted_FK.exp()
    columns = (top_k, settings.top_p[rows].astype(np.float32), settings.min_p[rows].astype(np.float32))
    limits_F1, top_p_F1, min_p_F1 = (torch.from_numpy(column[:, None]).to(index.device) for column in columns)
    probs_FK.masked_fill_(torch.arange(width, device=index.device) >= limits_F1, 0)
    before_FK = probs_FK.cumsum(dim=-1)
    top_p_F1, min_p_F1 = top_p_F1.to(probs_FK), min_p_F1.to(probs_FK)
    mass_F1 = torch.where(limits_F1 < vocabulary, before_FK[:, -1:], shown_FV.exp().sum(dim=-1, keepdim=True))
    before_FK -= probs_FK
    # A token stays if the more probable ones do not reach top_p; so the first always stays. top_p = 1 keeps all.
    beyond_FK = (before_FK >= top_p_F1 * mass_F1) & (top_p_F1 < 1)
    beyond_FK |= probs_FK < min_p_F1 * probs_FK[:, :1]
    beyond_FK[:, 0] = False
    enough_F = beyond_FK[:, -1] | (limits_F1[:, 0] <= width)
    probs_FK.masked_fill_(beyond_FK, 0)
    place_F1 = _invert(probs_FK, uniform_B1[index])
    ids_B1[index] = order_FK.gather(1, place_F1)
    logprobs_B1[index] = sorted_FK.gather(1, place_F1) - probs_FK.sum(dim=-1, keepdim=True).log()
    kept |= {r: order_FK[f, probs_FK[f] > 0].to(torch.int32).cpu().numpy() for f, r in enumerate(rows) if r in kept}
    return enough_F.cpu().numpy()


def _draw_greedy(shown_BV: torch.Tensor, rows: np.ndarray, ids_B1: torch.Tensor, logprobs_B1: torch.Tensor) -> None:
    """Take the most probable token of the greedy rows."""
    if not len(rows):
        return
    index = torch.from_numpy(rows).to(shown_BV.device)
    ids_B1[index] = shown_BV[index].argmax(dim=-1, keepdim=True)
    logprobs_B1[index] = 0
