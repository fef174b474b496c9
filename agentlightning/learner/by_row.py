"""One pass of a model whose rows are of different LoRA adapters: a linear layer computes for each row its own.

The adapters of a pass are joined per layer, A [K, in] and B [out, K] with K the sum of their ranks; a row keeps the
columns of its own adapter and zeros of the others', so that two products serve all of them. Exact for plain LoRA of
linear layers that are given rows; who computes with anything else says so before (`ByRow.mixes`) and takes turns.

Shape letters: R rows, Q tokens of a row, K ranks of all joined adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

SPARE = 4
"""So many adapters stay joined though a pass needs fewer of them."""


class NotByRow(Exception):
    """A layer was given something else than rows of tokens."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The adapters of one layer. `owners` [K] says which adapter's each rank is."""

    down: torch.Tensor
    up: torch.Tensor
    ranks: tuple[int, ...]
    owners: torch.Tensor


class ByRow:
    """Adapters of the tuner layers of a `PeftModel`, by peft's names of them."""

    def __init__(self, peft: Any, layers: Sequence[Any]) -> None:
        self._peft = peft
        self._layers = layers
        self._gives_rows: bool | None = None
        self._mixes: dict[str, bool] = {}
        self._names: list[str] = []
        self._joined: list[Joined | None] = []

    def changed(self) -> None:
        """Weights of adapters are others now: what was joined is not used again."""
        self._mixes.clear()
        self._names, self._joined = [], []

    def mixes(self, key: str) -> bool:
        """Whether an adapter can be in a pass beside others. One whose weights are not finite cannot: it would break
        the others' numbers as well."""
        if key not in self._mixes:
            self._mixes[key] = all(_is_plain(layer, key) for layer in self._layers) and self._rows_arrive()
        return self._mixes[key]

    @contextmanager
    def rows(self, keys: Sequence[str | None], which: np.ndarray) -> Iterator[None]:
        """Within the block the model computes row r with the adapter `keys[which[r]]`; None is the base without one."""
        present = {keys[n] for n in np.unique(which)}
        self._join({key for key in present if key is not None})
        place = np.array([self._names.index(key) if key in self._names else -1 for key in keys])
        try:
            self._replace(torch.from_numpy(place[which]))
            yield
        finally:
            self._restore()

    def _join(self, needed: set[str]) -> None:
        """Have these adapters joined, in few copies: of those that were needed before only a few stay."""
        if needed <= {*self._names} and len(self._names) <= max(SPARE, 2 * len(needed)):
            return
        kept = needed.union(self._names)
        names = sorted(kept if len(kept) <= SPARE else needed)
        with torch.no_grad():
            joined = [_join(layer, names) for layer in self._layers]
        self._names, self._joined = names, joined

    def _replace(self, adapter_R: torch.Tensor) -> None:
        """For one pass the layers' own forward gives way: it knows one adapter for all rows."""
        foreign: dict[tuple[int, ...], torch.Tensor] = {}
        for layer, joined in zip(self._layers, self._joined, strict=True):
            if joined is None:
                layer.forward = _without(layer)
                continue
            if joined.ranks not in foreign:
                adapter_R = adapter_R.to(joined.owners.device)
                foreign[joined.ranks] = (adapter_R[:, None] != joined.owners)[:, None]
            layer.forward = _with(layer, joined, foreign[joined.ranks])

    def _restore(self) -> None:
        for layer in self._layers:
            vars(layer).pop("forward", None)

    def _rows_arrive(self) -> bool:
        """Whether the model hands its tuner layers rows, and not, say, all tokens in one list. Tried once, with shapes
        that nothing else has."""
        from peft.utils.other import AuxiliaryTrainingWrapper

        if self._gives_rows is None:
            device = next(self._peft.parameters()).device
            ids = torch.zeros(3, 5, dtype=torch.long, device=device)
            for layer in self._layers:
                layer.forward = _watched(layer)
            try:
                with torch.no_grad():
                    self._peft.get_base_model()(input_ids=ids, use_cache=False)
                self._gives_rows = not any(isinstance(m, AuxiliaryTrainingWrapper) for m in self._peft.modules())
            except NotByRow:
                self._gives_rows = False
            finally:
                self._restore()
        return self._gives_rows


def _is_plain(layer: Any, key: str) -> bool:
    """Whether what an adapter adds to a layer, if anything, is B A x times a number, all of it finite."""
    from peft.tuners.lora.layer import Linear

    if not any(key in getattr(layer, name) for name in layer.adapter_layer_names):
        return True
    if type(layer) is not Linear or key not in layer.lora_A or key in layer.lora_variant:
        return False
    up: Any = layer.lora_B[key]
    return up.bias is None and bool(torch.isfinite(up.weight).all())


def _join(layer: Any, names: Sequence[str]) -> Joined | None:
    here = [(place, name) for place, name in enumerate(names) if name in getattr(layer, "lora_A", ())]
    if not here:
        return None
    down = torch.cat([layer.lora_A[name].weight * layer.scaling[name] for _, name in here])
    up = torch.cat([layer.lora_B[name].weight for _, name in here], dim=1)
    ranks = tuple(place for place, name in here for _ in range(layer.lora_A[name].weight.shape[0]))
    return Joined(down, up, ranks, torch.tensor(ranks, device=down.device))


def _with(layer: Any, joined: Joined, foreign_R1K: torch.Tensor) -> Any:
    def forward(x_RQ: torch.Tensor) -> torch.Tensor:
        if x_RQ.dim() != 3 or len(x_RQ) != len(foreign_R1K):
            raise NotByRow(f"{tuple(x_RQ.shape)} are not {len(foreign_R1K)} rows")
        inner_RQK = linear(x_RQ.to(joined.down.dtype), joined.down).masked_fill_(foreign_R1K, 0.0)
        result_RQ = layer.base_layer(x_RQ)
        return (result_RQ + linear(inner_RQK, joined.up)).to(result_RQ.dtype)

    return forward


def _without(layer: Any) -> Any:
    return lambda *args, **kwargs: layer.base_layer(*args, **kwargs)


def _watched(layer: Any) -> Any:
    def forward(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if x.shape[:2] != (3, 5):
            raise NotByRow(f"{tuple(x.shape)} are not 3 rows of 5 tokens")
        return layer.base_layer(x, *args, **kwargs)

    return forward
