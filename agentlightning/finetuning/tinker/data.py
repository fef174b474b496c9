"""What is learned from: a client's data as packed passes, and what came of them as the client reads it. Numpy only.

A datum is a sequence of tokens, with one target, or K of them, after each. All data of a request are one token tree, or
several where they are many: what they share is computed once.

Shape letters: T tokens of a datum, K targets of a token, N tokens, E loss entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import msgspec
from google.protobuf.message import DecodeError

from agentlightning.adapter.tree import build_tree
from agentlightning.finetuning.tinker.proto import ForwardBackwardOutput, ForwardBackwardRequest, unknown_fields
from agentlightning.gateway.exchange import Refusal
from agentlightning.learner.base import LossConfig, PackedBatch, PassResult
from agentlightning.types.arrays import Float32Array, Int32Array, np

FLOAT32 = 1
STABLE_REINFORCE = "stable_reinforce"
PASS_TOKENS = 16384
"""Tokens of data in one pass, counted as if they shared none."""
MOST_CELLS = PASS_TOKENS * 1024
"""Of the sparse tensors of a request, together: as many as a body has room for if they are not sparse."""
_DTYPES = {1: "float32", 2: "int64", 3: "int32"}


@dataclass(frozen=True)
class LossForm:
    """One of the API's losses: its inputs, and the learner's settings for it."""

    name: str
    """A loss of `learner.catalog.LOSSES`, or the import path of one."""
    inputs: frozenset[str]
    optional: frozenset[str] = frozenset()
    """Inputs that may be missing: each is then 1."""
    config: Mapping[str, float] = field(default_factory=dict)
    """Its settings with what they are where the client does not say. Those of GSPO are its paper's."""
    advantages: str = "advantages"
    """The input that is the advantage …"""
    weights: str | None = None
    """… and the one, or the setting, that is the weight; None: it is 1."""


_POLICY = frozenset(("logprobs", "advantages"))
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSS_FORMS: Mapping[str, LossForm] = {
    "cross_entropy": LossForm("reinforce", frozenset(), frozenset(("weights",)), advantages="weights"),
    "importance_sampling": LossForm("ppo_clip", _POLICY),
    "ppo": LossForm("ppo_clip", _POLICY, config=_CLIP),
    "cispo": LossForm("cispo", _POLICY, config=_CLIP),
    "dro": LossForm("agentlightning.learner.weighted_losses:dro", _POLICY, config={"beta": 0.05}, weights="beta"),
    "gspo": LossForm(
        "agentlightning.learner.weighted_losses:gspo",
        _POLICY,
        frozenset(("sequence_ratio_mask",)),
        config={"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        weights="sequence_ratio_mask",
    ),
}
"""By the API's names."""


@dataclass(frozen=True)
class Datum:
    """A sequence and what is asked of it. The values have the shape of `targets`."""

    tokens_T: Int32Array
    targets: Int32Array
    """Shape [T] or [T, K]."""
    present: np.ndarray
    """Which targets there are; all, unless they were given sparsely."""
    values: Mapping[str, Float32Array]


@dataclass(frozen=True)
class PassRequest:
    """What a client's call of forward or forward_backward asks."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: LossConfig
    forward_only: bool

    @property
    def size(self) -> int:
        """The bytes of its arrays."""
        arrays = (array for datum in self.data for array in (datum.targets, datum.present, *datum.values.values()))
        return sum(array.nbytes for array in arrays)

    def passes(self) -> list[tuple[list[Datum], PackedBatch]]:
        """The data in parts, each with its pass."""
        return [(part, _packed(part)) for part in _parts(self.data)]


class _Numbered(msgspec.Struct):
    model_id: str
    seq_id: int


def read_request(body: bytes, stable_reinforce: Callable[[str], str | None] = lambda model_id: None) -> PassRequest:
    """Raises `Refusal` for what cannot be computed, with the name of the field. `stable_reinforce` says which loss a
    training client's base model has instead of this one."""
    request = ForwardBackwardRequest()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise Refusal(f"The body is no ForwardBackwardRequest: {error}.", code="invalid_protobuf") from None
    if unknown := [*unknown_fields(request), *(name for datum in request.data for name in unknown_fields(datum))]:
        raise Refusal(f"The request has fields that this server does not know: {', '.join(sorted(set(unknown)))}.")
    if request.loss_fn == STABLE_REINFORCE and (instead := stable_reinforce(request.model_id)) is not None:
        request.loss_fn = instead
    _check_cells(request.data)
    form = LOSS_FORMS.get(request.loss_fn)
    if form is None:
        raise Refusal(
            f"loss_fn is {request.loss_fn!r}; this server has {', '.join(LOSS_FORMS)}, and forward_backward_custom.",
            param="loss_fn",
        )
    if not request.data:
        raise Refusal("data is empty; there is nothing to compute.", param="data")
    config = _config(request, form)
    data = [_datum(i, datum, request.loss_fn, form, config) for i, datum in enumerate(request.data)]
    return PassRequest(
        request.model_id, request.seq_id, data, _loss(request.loss_fn, form, config), request.forward_only
    )


def turn_of(body: bytes) -> tuple[str, int] | None:
    """The training client and the number of its request in a body of JSON or protobuf, also where that is refused."""
    try:
        if body.startswith(b"{"):
            named = msgspec.json.decode(body, type=_Numbered)
        else:
            named = ForwardBackwardRequest()
            named.ParseFromString(body)
    except (msgspec.DecodeError, UnicodeError, DecodeError, RecursionError):
        return None
    return named.model_id, named.seq_id


def _check_cells(data: Any) -> None:
    """Raises `Refusal` where a few bytes would become an array that fills the memory."""
    tensors = (tensor for datum in data for tensor in datum.loss_fn_inputs.values())
    cells = sum(abs(math.prod(tensor.shape)) for tensor in tensors if tensor.HasField("sparse_csr"))
    if cells > MOST_CELLS:
        raise Refusal(f"The sparse tensors of data have {cells} cells together, and may have {MOST_CELLS}.")


def check_tokens(data: Sequence[Datum], vocabulary: int, longest: int) -> None:
    """Raises `Refusal` for tokens that a model has not, and for more of them than it takes."""
    for i, datum in enumerate(data):
        if len(datum.tokens_T) > longest:
            raise Refusal(
                f"data[{i}] has {len(datum.tokens_T)} tokens, and this model takes {longest} here.",
                param="model_input",
            )
        for name, ids in (("model_input", datum.tokens_T), ("target_tokens", datum.targets)):
            if ids.min() < 0 or ids.max() >= vocabulary:
                raise Refusal(f"data[{i}].{name} has a token that is not in 0 … {vocabulary - 1}.", param=name)


def _config(request: Any, form: LossForm) -> dict[str, float]:
    given: dict[str, Any] = dict(request.loss_fn_config)
    for name, value in request.loss_fn_config_v2.items():
        given[name] = value.text if value.HasField("text") else value.number
    for name, value in given.items():
        if name not in form.config:
            known = f"it has {', '.join(form.config)}" if form.config else "it has none"
            raise Refusal(f"loss_fn_config has '{name}', which {request.loss_fn} does not have; {known}.", param=name)
        if not isinstance(value, float) or not math.isfinite(value):
            raise Refusal(f"loss_fn_config['{name}'] is {value!r}; give a number.", param=name)
    return {**form.config, **given}


def _loss(name: str, form: LossForm, config: Mapping[str, float]) -> LossConfig:
    """Ratios of importance sampling are clipped nowhere, thresholds are bounds of the ratio itself."""
    if name == "importance_sampling":
        return LossConfig(name=form.name, clip_low=1.0, clip_high=math.inf)
    if "clip_low_threshold" in config:
        low, high = config["clip_low_threshold"], config["clip_high_threshold"]
        if not 0 <= low <= 1 <= high:
            raise Refusal(
                f"clip_low_threshold is {low:g} and clip_high_threshold {high:g}; they are bounds of a ratio, such as "
                "0.8 and 1.2.",
                param="clip_low_threshold",
            )
        return LossConfig(name=form.name, clip_low=1 - low, clip_high=high - 1)
    return LossConfig(name=form.name)


def _datum(i: int, datum: Any, loss: str, form: LossForm, config: Mapping[str, float]) -> Datum:
    where = f"data[{i}]"
    tokens_T = _tokens(where, datum)
    inputs = datum.loss_fn_inputs
    known = {"target_tokens", *form.inputs, *form.optional}
    if unknown := sorted({*inputs} - known):
        raise Refusal(
            f"{where}.loss_fn_inputs has '{unknown[0]}', which {loss} does not use here; it uses "
            f"{', '.join(sorted(known))}.",
            param=unknown[0],
        )
    if missing := sorted(({"target_tokens"} | form.inputs) - {*inputs}):
        raise Refusal(f"{where}.loss_fn_inputs has no '{missing[0]}', which {loss} needs.", param=missing[0])
    targets, present = _array(where, "target_tokens", inputs["target_tokens"])
    if targets.ndim not in (1, 2) or len(targets) != len(tokens_T) or not present.any():
        raise Refusal(
            f"{where}.target_tokens has the shape {targets.shape}; it is [{len(tokens_T)}] or [{len(tokens_T)}, K], "
            "one row for each token of model_input.",
            param="target_tokens",
        )
    if targets.dtype.kind != "i" or targets.min() < 0 or targets.max() >= 2**31:
        raise Refusal(f"{where}.target_tokens holds something that is no token id.", param="target_tokens")
    values: dict[str, Float32Array] = {}
    for name in known - {"target_tokens"}:
        values[name] = _values(where, name, inputs, targets.shape)
    weight = config.get(form.weights or "")
    return Datum(
        tokens_T,
        targets.astype(np.int32),
        present,
        {
            "advantages": values[form.advantages],
            "old": values.get("logprobs", np.zeros(targets.shape, dtype=np.float32)),
            "weights": values.get(form.weights or "", np.full(targets.shape, weight or 1.0, dtype=np.float32)),
        },
    )


def _values(where: str, name: str, inputs: Any, shape: tuple[int, ...]) -> Float32Array:
    if name not in inputs:
        return np.ones(shape, dtype=np.float32)
    found, _ = _array(where, name, inputs[name])
    if found.shape != shape:
        raise Refusal(f"{where}.{name} has the shape {found.shape}, and target_tokens {shape}.", param=name)
    if not np.isfinite(found).all():
        raise Refusal(f"{where}.{name} has a value that is no finite number.", param=name)
    return found.astype(np.float32)


def _tokens(where: str, datum: Any) -> Int32Array:
    parts: list[Int32Array] = []
    for chunk in datum.model_input:
        if not chunk.HasField("encoded_text"):
            raise Refusal(f"{where}.model_input has a chunk that is no text; this server has text models.")
        parts.append(_buffer(where, "model_input", chunk.encoded_text.tokens, np.int32))
    tokens = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int32)
    if not len(tokens):
        raise Refusal(f"{where}.model_input has no token.", param="model_input")
    return tokens


def _array(where: str, name: str, tensor: Any) -> tuple[np.ndarray, np.ndarray]:
    """A tensor, and which of its cells were given."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise Refusal(f"{where}.{name} has the dtype {tensor.dtype}; float32, int64 and int32 are known.", param=name)
    shape = tuple(tensor.shape)
    if not tensor.HasField("sparse_csr"):
        flat = _buffer(where, name, tensor.dense, dtype)
        shape = shape or (len(flat),)
        if math.prod(shape) != len(flat):
            raise Refusal(f"{where}.{name} has {len(flat)} values for the shape {shape}.", param=name)
        return flat.reshape(shape), np.ones(shape, dtype=np.bool_)
    values = _buffer(where, name, tensor.sparse_csr.values, dtype)
    rows = _buffer(where, name, tensor.sparse_csr.crow_indices, np.int64)
    columns = _buffer(where, name, tensor.sparse_csr.col_indices, np.int64)
    if (
        len(shape) != 2
        or math.prod(shape) > MOST_CELLS
        or len(rows) != shape[0] + 1
        or len(columns) != len(values)
        or (rows[0], rows[-1]) != (0, len(values))
        or (np.diff(rows) < 0).any()
        or (len(columns) and not 0 <= columns.min() <= columns.max() < shape[1])
    ):
        raise Refusal(f"{where}.{name} is no sparse matrix of the shape {shape}.", param=name)
    dense, given = np.zeros(shape, dtype=dtype), np.zeros(shape, dtype=np.bool_)
    at = (np.repeat(np.arange(shape[0]), np.diff(rows)), columns)
    dense[at], given[at] = values, True
    return dense, given


def _buffer(where: str, name: str, data: bytes, dtype: Any) -> np.ndarray:
    if len(data) % np.dtype(dtype).itemsize:
        raise Refusal(f"{where}.{name} is cut off within a number.", param=name)
    return np.frombuffer(data, dtype=dtype)


def _parts(data: Sequence[Datum]) -> Iterator[list[Datum]]:
    """Neighbours together, as many as a pass takes."""
    part: list[Datum] = []
    size = 0
    for datum in data:
        cost = max(len(datum.tokens_T), int(datum.present.sum()))
        if part and size + cost > PASS_TOKENS:
            yield part
            part, size = [], 0
        part.append(datum)
        size += cost
    yield part


def _packed(part: Sequence[Datum]) -> PackedBatch:
    tree = build_tree([datum.tokens_T for datum in part])
    counts = [int(datum.present.sum()) for datum in part]
    number_E = np.repeat(np.arange(len(part), dtype=np.int32), counts)

    def joined(name: str) -> Float32Array:
        return np.concatenate([datum.values[name][datum.present] for datum in part])

    sources = [tree.locate(i, np.nonzero(datum.present)[0].astype(np.int32)) for i, datum in enumerate(part)]
    return PackedBatch(
        ids_N=tree.ids_N,
        positions_N=tree.positions_N,
        starts_S=tree.starts_S,
        parents_S=tree.parents_S,
        source_E=np.concatenate(sources),
        targets_E=np.concatenate([datum.targets[datum.present] for datum in part]),
        sequence_E=number_E,
        group_E=number_E,
        old_logprobs_E=joined("old"),
        advantages_E=joined("advantages"),
        weights_E=joined("weights"),
        temperature_E=np.ones(len(number_E), dtype=np.float32),
    )


def written(parts: Sequence[tuple[Sequence[Datum], PassResult]]) -> bytes:
    """A ForwardBackwardOutput: log-probs in the shape of the targets, 0 where none was asked for, and metrics, whose
    names say how those of several requests are joined."""
    output = ForwardBackwardOutput(loss_fn_output_type="TokenLogprobs")
    shaped: list[Float32Array] = []
    for data, result in parts:
        start = 0
        for datum in data:
            logprobs, end = np.zeros(datum.targets.shape, dtype=np.float32), start + int(datum.present.sum())
            logprobs[datum.present] = result.logprobs[start:end]
            shaped.append(logprobs)
            start = end
    for trailing, same in groupby(shaped, key=lambda logprobs: logprobs.shape[1:]):
        arrays = list(same)
        record = output.loss_fn_outputs.add(type_tag="TokenLogprobs", num_datums=len(arrays))
        batched = record.fields["logprobs"]
        batched.data = b"".join(array.tobytes() for array in arrays)
        batched.offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype=np.int64).tobytes()
        batched.dtype = FLOAT32
        batched.trailing_shape.extend(trailing)
    output.metrics["loss:sum"] = sum(result.loss for _, result in parts)
    output.metrics["tokens:sum"] = float(sum(len(datum.tokens_T) for data, _ in parts for datum in data))
    output.metrics["tokens_computed:sum"] = float(sum(result.tree_tokens for _, result in parts))
    output.metrics["entropy:mean"] = _mean(parts, "entropy")
    output.metrics["clip_fraction:mean"] = _mean(parts, "clip_fraction")
    return output.SerializeToString()


def _mean(parts: Sequence[tuple[Sequence[Datum], PassResult]], name: str) -> float:
    weights = [len(result.logprobs) for _, result in parts]
    return float(np.average([result.metrics.get(name, 0.0) for _, result in parts], weights=weights))
