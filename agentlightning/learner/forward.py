"""One pass of a model over a packed batch: log-probs and entropies of the entries, and hidden states for a critic.

A tree is computed with each token once (`tree_attention`, `tree_recurrence`), or, for models that cannot,
as its separate rows: every leaf with all it stands on. All give the same numbers. Logits exist only for tokens that
predict an entry, and only so many at the same time.

Shape letters: N tokens, E loss entries, U distinct source tokens, V vocabulary, H hidden size, K kept tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from agentlightning.learner.base import LearnerOptions, PackedBatch
from agentlightning.learner.tree_attention import plan_flex, plan_tree, tree_attention
from agentlightning.learner.tree_recurrence import plan_recurrence, recurrent_layers, tree_recurrence

ROW_TOKENS = 8192
"""Tokens of rows that are computed together, padding included."""


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """What a pass says of each entry."""

    logprobs_E: Tensor
    """Log-probs of the targets at their temperature: plain, or over the tokens that the batch says a filter kept."""
    entropy_E: Tensor
    """With gradient only if it was asked for."""
    hidden_EH: Tensor
    """Last hidden states at the sources, without gradient."""
    likeliest_E: Tensor | None = None
    """Whether each target is the likeliest token of all, where that was asked for."""


def why_no_tree(model: PreTrainedModel, longest: int) -> str | None:
    """Why a model cannot compute trees of paths up to `longest` tokens; None if it can."""
    config = model.config.get_text_config()
    types = list(config.to_dict().get("layer_types") or ["full_attention"])
    kinds = set(types)
    window = config.to_dict().get("sliding_window")
    other = kinds - {"full_attention", "sliding_attention", "chunked_attention"}
    hybrid = "linear_attention" in kinds and len(recurrent_layers(model)) == types.count("linear_attention")
    if hybrid:
        other -= {"linear_attention"}
    if other:
        return f"its layers of type {', '.join(sorted(other))} read tokens one after the other"
    if not (model._supports_attention_backend or hybrid):  # the hybrids that are known do, and do not say so
        return f"{type(model).__name__} does not accept another attention function"
    if "chunked_attention" in kinds:
        return "its attention is cut into chunks"
    windowed = "sliding_attention" in kinds or ("layer_types" not in config.to_dict() and window is not None)
    if windowed and window is not None and longest > window:
        return f"its sliding window is {window} tokens, and a path has {longest}"
    return None


def takes_flex(options: LearnerOptions, device: torch.device) -> bool:
    """Whether trees attend by FlexAttention on this device."""
    return options.tree_attention == "flex" or (options.tree_attention == "auto" and device.type == "cuda")


def score(
    model: PreTrainedModel,
    batch: PackedBatch,
    options: LearnerOptions,
    *,
    rows: bool,
    entropy_grad: bool = False,
    likeliest: bool = False,
) -> Scores:
    """Compute a batch, as one packed row or as separate rows; with `likeliest`, also which targets are that."""
    device = model.device
    as_tree = nullcontext if rows else _as_tree(model, batch)
    saving = options.gradient_checkpointing and torch.is_grad_enabled()
    activations = partial(_saving_activations, model, as_tree, wanted=saving)
    if rows:
        hidden_NH, source_E = _rows(model, batch, activations)
    else:
        with activations(), as_tree():
            hidden_NH, source_E = _tree(model, batch, flex=takes_flex(options, device))
    order_E = np.argsort(source_E, kind="stable")
    sources_U, row_E = np.unique(source_E[order_E], return_inverse=True)
    hidden_UH = hidden_NH[as_long(sources_U, device)]
    targets_E = as_long(batch.targets_E[order_E], device)
    temperature_E = torch.as_tensor(batch.temperature_E[order_E], device=device)
    kept_EK = np.empty((len(order_E), 0)) if batch.kept_EK is None else batch.kept_EK[order_E]
    kept_EK = as_long(kept_EK, device)

    def piece(hidden_UH: Tensor, *of_entries: Tensor) -> tuple[Tensor, ...]:
        return _targets(_logits(model, hidden_UH), *of_entries, entropy_grad=entropy_grad, likeliest=likeliest)

    vocabulary = model.config.get_text_config().vocab_size
    cuts = list(_pieces(row_E, max(options.logits_at_once // vocabulary, 1)))
    results: list[tuple[Tensor, ...]] = []
    for low, high in cuts:
        first, last = int(row_E[low]), int(row_E[high - 1])
        rows_E = as_long(row_E[low:high] - first, device)
        of_entries = (targets_E[low:high], temperature_E[low:high], kept_EK[low:high])
        given = (hidden_UH[first : last + 1], rows_E, *of_entries)
        again = len(cuts) > 1 and torch.is_grad_enabled()
        results.append(checkpoint(piece, *given, use_reentrant=False) if again else piece(*given))  # pyright: ignore
    back_E = as_long(np.argsort(order_E), device)
    logprobs_E, entropy_E, *more = (torch.cat(parts)[back_E] for parts in zip(*results, strict=True))
    return Scores(logprobs_E, entropy_E, hidden_UH.detach()[as_long(row_E, device)][back_E], *more)


def _pieces(row_E: np.ndarray, size: int) -> Iterator[tuple[int, int]]:
    """Cut sorted entries so that a piece has at most `size` entries (and so at most as many source tokens)."""
    for low in range(0, len(row_E), size):
        yield low, min(low + size, len(row_E))


def _as_tree(model: PreTrainedModel, batch: PackedBatch) -> Callable[[], AbstractContextManager[None]]:
    """Within what this gives, the model's layers compute the batch's packed row as the tree that it is."""
    layers = recurrent_layers(model)
    if not layers:
        return partial(tree_attention, model)
    plan = plan_recurrence(batch, model.device)

    @contextmanager
    def as_tree() -> Iterator[None]:
        with tree_attention(model), tree_recurrence(layers, plan):
            yield

    return as_tree


def _tree(model: PreTrainedModel, batch: PackedBatch, *, flex: bool) -> tuple[Tensor, np.ndarray]:
    """Hidden states of every node, [N, H], and where in them each entry's source is."""
    device = model.device
    tree = plan_flex(batch, device) if flex else plan_tree(batch, device)
    hidden = decoder_of(model)(
        input_ids=as_long(batch.ids_N, device)[None],
        position_ids=as_long(batch.positions_N, device)[None],
        attention_mask=None,
        use_cache=False,
        tree=tree,
    ).last_hidden_state
    return hidden[0], batch.source_E


def _rows(
    model: PreTrainedModel, batch: PackedBatch, activations: Callable[[], AbstractContextManager[None]]
) -> tuple[Tensor, np.ndarray]:
    """Hidden states of every leaf's row, and where in them each entry's source is.

    Rows of similar length are padded at the end and computed together; causality keeps the padding out of sight. Where
    that takes several passes, each keeps its result only and is computed again for its gradient: rows can be many times
    the tokens of their tree, and memory stays that of one pass. Layers are computed within `activations`, both times.
    """

    def passed(ids_BL: Tensor) -> Tensor:
        with activations():
            return decoder_of(model)(input_ids=ids_BL, use_cache=False).last_hidden_state

    rows = sorted(leaf_rows(batch), key=lambda row: len(row[0]))
    hidden: list[Tensor] = []
    source_E = np.zeros_like(batch.source_E)
    start = 0
    again = torch.is_grad_enabled() and len(rows) > max(ROW_TOKENS // len(rows[-1][0]), 1)
    while rows:
        width = len(rows[-1][0])
        together = [rows.pop() for _ in range(min(len(rows), max(ROW_TOKENS // width, 1)))]
        ids_BL = np.zeros((len(together), width), dtype=np.int64)
        for b, (nodes_L, entries) in enumerate(together):
            ids_BL[b, : len(nodes_L)] = batch.ids_N[nodes_L]
            source_E[entries] = start + b * width + batch.positions_N[batch.source_E[entries]]
        ids = as_long(ids_BL, model.device)
        found = checkpoint(passed, ids, use_reentrant=False) if again else passed(ids)
        hidden.append(found.flatten(0, 1))  # pyright: ignore[reportOptionalMemberAccess]
        start += ids_BL.size
    return torch.cat(hidden), source_E


def leaf_rows(batch: PackedBatch) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """For each leaf: the nodes of its path from the root, and the entries to compute in its row (each in one row)."""
    ends_S = np.append(batch.starts_S[1:], len(batch.ids_N))
    segment_E = np.searchsorted(batch.starts_S, batch.source_E, side="right") - 1
    waiting = np.ones(len(batch.source_E), dtype=bool)
    parents = set(batch.parents_S.tolist())
    for leaf in (s for s in range(len(ends_S)) if s not in parents):
        path = [leaf]
        while batch.parents_S[path[-1]] >= 0:
            path.append(int(batch.parents_S[path[-1]]))
        entries = np.flatnonzero(waiting & np.isin(segment_E, path))
        if len(entries):
            waiting[entries] = False
            yield np.concatenate([np.arange(batch.starts_S[s], ends_S[s]) for s in reversed(path)]), entries


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The part of a causal LM that makes hidden states. Some families' own `get_decoder` answers something else."""
    decoder = model.get_decoder()
    if isinstance(decoder, PreTrainedModel) and decoder is not model:
        return decoder
    return next(part for part in model.children() if isinstance(part, PreTrainedModel))


class _Decoded(tuple[Tensor]):
    """A decoder's output that holds hidden states and nothing else: every other field is None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


@contextmanager
def _decoder_gives(model: PreTrainedModel, hidden_1UH: Tensor) -> Iterator[None]:
    """Within the block the model's decoder computes nothing and returns these hidden states."""
    decoder = decoder_of(model)
    decoder.forward = lambda *_, **__: _Decoded((hidden_1UH,))
    try:
        yield
    finally:
        del decoder.forward


def _logits(model: PreTrainedModel, hidden_UH: Tensor) -> Tensor:
    """The model's own way from last hidden states to logits, whatever it scales or caps there. At least float32."""
    ids_1U = torch.zeros(1, len(hidden_UH), dtype=torch.long, device=hidden_UH.device)
    with _decoder_gives(model, hidden_UH[None]):
        logits_UV = model(input_ids=ids_1U, use_cache=False).logits[0]
    return logits_UV.to(torch.promote_types(logits_UV.dtype, torch.float32))


def distributions(model: PreTrainedModel, hidden_EH: Tensor, temperature_E: Tensor) -> Tensor:
    """Log-probs of every next token after these last hidden states, [E, V]."""
    return (_logits(model, hidden_EH) / temperature_E[:, None]).log_softmax(-1)


def _targets(
    logits_UV: Tensor,
    rows_E: Tensor,
    targets_E: Tensor,
    temperature_E: Tensor,
    kept_EK: Tensor,
    *,
    entropy_grad: bool,
    likeliest: bool,
) -> tuple[Tensor, ...]:
    """Log-probs of the targets, over the kept tokens where some are named, and the entropy of the plain softmax; with
    `likeliest`, also whether each target is the likeliest token."""
    plain = len(rows_E) == len(logits_UV) and bool((rows_E[1:] > rows_E[:-1]).all())
    logits_EV = logits_UV if plain else logits_UV[rows_E]
    if bool((temperature_E != 1.0).any()):
        logits_EV = logits_EV / temperature_E[:, None].to(logits_EV.dtype)
    logprobs_EV = logits_EV.log_softmax(-1)
    with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
        entropy_E = -(logprobs_EV.exp() * logprobs_EV).sum(-1)
    logprobs_E = logprobs_EV.gather(1, targets_E[:, None])[:, 0]
    if kept_EK.shape[1]:
        some_EK = logprobs_EV.gather(1, kept_EK.clamp(min=0)).masked_fill(kept_EK < 0, -torch.inf)
        named_E = kept_EK[:, 0] >= 0
        # Where none is named, all are: their sum is 1. The inner `where` keeps the gradient of a row of −inf finite.
        some_EK = torch.where(named_E[:, None], some_EK, 0.0)
        logprobs_E = logprobs_E - torch.where(named_E, some_EK.logsumexp(-1), 0.0)
    if likeliest:
        return logprobs_E, entropy_E, logprobs_EV.detach().argmax(-1) == targets_E
    return logprobs_E, entropy_E


@contextmanager
def _saving_activations(
    model: PreTrainedModel, again: Callable[[], AbstractContextManager[None]], wanted: bool
) -> Iterator[None]:
    """Gradient checkpointing of the layers within the block; what is computed a second time is computed in `again`.

    Dropout stays off: only the layers' own flag says that they are training.
    """
    if not wanted:
        yield
        return
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    compute = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), again()))
    for layer in layers:
        layer.training = layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = compute  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        for layer in layers:
            layer.training = layer.gradient_checkpointing = False


def as_long(array: np.ndarray, device: torch.device) -> Tensor:
    return torch.as_tensor(array.astype(np.int64), device=device)
