"""Several policies on one base model: named LoRA adapters in one `PeftModel`.

The base is in memory once, for all policies, their engine and their learners; it never changes. Code that computes for
one policy activates it first (`Policy.activate`); code that computes for several in one pass names the adapter of each
row (`rows`).

In such a pass a linear layer computes for each row its own adapter: the adapters are joined per layer, A [K, in] and B
[out, K] with K the sum of their ranks, and a row keeps the columns of its own adapter and zeros of the others', so that
two products serve all of them. That is exact for plain LoRA of linear layers that are given rows; anything else is
found before (`_ByRow.mixes`) and takes turns.

Shape letters: R rows, Q tokens of a row, K ranks of all joined adapters.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import linear

from agentlightning.errors import ConfigError, ModelError
from agentlightning.learner.policy import (
    LoraSpec,
    Policy,
    load_policy,
    lora_config,
    peft_calls_deprecated_names,
    seeded,
    take_up_adapter,
)

PARTS = ("attention", "mlp", "unembedding")
"""The parts into which the linear layers of a model fall."""


def modules_of(model: Any, parts: Sequence[str]) -> list[str]:
    """The names of the linear layers of these parts. Those outside attention and the output layer are the MLP's."""
    output = model.get_output_embeddings()
    found: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            above = ".".join(name.split(".")[:-1])
            inside = "attention" if "attn" in above or "attention" in above else "mlp"
            if ("unembedding" if module is output else inside) in parts:
                found.append(name)
    return found


class PeftAdapters:
    """The adapters of one base model by policy, and which of them the layers compute with. They come and go."""

    def __init__(self, model: Any, frozen: str | None = None) -> None:
        """No adapter yet. `frozen` is the name of the base without an adapter, if it has one."""
        self.names = [] if frozen is None else [frozen]
        self.peft: Any = None
        """The `PeftModel` around the base, from the first adapter on."""
        self._frozen = frozen
        self._model = model
        self._active = frozen
        self._linear = {part: modules_of(model, [part]) for part in PARTS}
        self._layers: list[Any] = []
        self._by_row = _ByRow(None, [])

    def add(self, name: str, source: str | LoraSpec) -> None:
        """One more adapter: the one in a directory, or a new one, whose weights are drawn as torch is seeded. Its
        parameters take gradients from now on.

        Raises ModelError for a directory without an adapter that fits the base.
        """
        key = _key(name)
        folder = None if isinstance(source, LoraSpec) else source
        if folder is not None and not (Path(folder) / "adapter_config.json").is_file():
            raise ModelError(
                f"There is no adapter for the policy '{name}' in {source}. Give the directory that a checkpoint holds "
                "for each policy: checkpoints/step-…/model/<policy>."
            )
        config = self._config(source) if isinstance(source, LoraSpec) else _config_in(source)
        for layer in self._layers:
            layer.enable_adapters(True)
        with peft_calls_deprecated_names():
            if self.peft is None:
                self.peft = _wrap(self._model, key, config)
            else:
                self.peft.add_adapter(key, config)
            if folder is not None:
                _load(self.peft, name, folder)
        self.names.insert(len(self.names) - (self._frozen is not None), name)
        self._activate(name)

    def _config(self, spec: LoraSpec) -> Any:
        if spec.parts:
            spec = replace(spec, target_modules=[name for part in spec.parts for name in self._linear[part]])
        return lora_config(spec)

    def remove(self, name: str) -> None:
        """Forget an adapter."""
        if name == self._frozen:
            raise ConfigError("This policy is the base model, which is there as long as its adapters.")
        other = next((n for n in self.names if n not in (name, self._frozen)), None)
        if other is not None:
            self._activate(other)
        self.peft.delete_adapter(_key(name))
        self.names.remove(name)
        if other is None:
            self._find_layers()
            self._active = self._frozen

    def _activate(self, name: str) -> None:
        """Compute with an adapter, as peft itself turns to one."""
        for layer in self._layers:
            layer.enable_adapters(True)
        self.peft.eval()
        self.peft.set_adapter(_key(name))
        self._active = name
        self._find_layers()

    def _find_layers(self) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        # peft's own `set_adapter` walks all modules of the model, which would cost a good part of a small one's step.
        self._layers = [module for module in self.peft.modules() if isinstance(module, BaseTunerLayer)]
        self._by_row = _ByRow(self.peft, self._layers)

    def use(self, name: str) -> None:
        """Compute with this policy's adapter from now on, and let its parameters alone take gradients; as the base,
        nothing does.
        """
        if name == self._active:
            return
        frozen = name == self._frozen
        for layer in self._layers:
            if not frozen:
                layer.set_adapter(_key(name))
            if self._frozen in (name, self._active):
                layer.enable_adapters(not frozen)
        self._active = name

    def mixes(self, name: str) -> bool:
        """Whether rows of this policy can be in a pass with rows of others."""
        return name == self._frozen or self._by_row.mixes(_key(name))

    def rows(self, names: Sequence[str], which: np.ndarray) -> AbstractContextManager[None]:
        """Within the block the model computes row r of a pass for the policy `names[which[r]]`. All of them mix."""
        return self._by_row.rows([None if name == self._frozen else _key(name) for name in names], which)

    def changed(self) -> None:
        """Adapters have other weights now."""
        self._by_row.changed()

    def save(self, name: str, directory: Path) -> None:
        """Write one adapter as a PEFT directory that loads on the base."""
        if name == self._frozen:
            raise ConfigError("This policy is the base model, which is not trained and so not saved.")
        key = _key(name)
        # Without this word peft writes the base's embedding beside an adapter of the output layer.
        self.peft.save_pretrained(directory, selected_adapters=[key], save_embedding_layers=False)
        for file in (directory / key).iterdir():
            file.rename(directory / file.name)
        shutil.rmtree(directory / key)

    def take_up(self, name: str, directory: str) -> None:
        """Give an adapter the weights of the one in a directory, which must be of its shape."""
        if name == self._frozen:
            raise ConfigError("This policy is the base model, which takes up no adapter.")
        take_up_adapter(self.peft, _key(name), directory)


def load_policies(
    base: str | Path,
    sources: Mapping[str, str | None],
    *,
    frozen: str | None = None,
    lora: LoraSpec | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> dict[str, Policy]:
    """Policies by name on one base model, each a new adapter (None) or the one in a directory. More can be added later
    (`PeftAdapters.add`).

    `frozen` is the name of one more: the base itself, which has nothing to train. Raises ModelError for a base that is
    an adapter itself or an adapter that does not fit it.
    """
    policy = load_policy(base, device=device, dtype=dtype)
    if policy.peft is not None:
        raise ModelError(
            f"'{base}' is an adapter; several policies need a base model. Merge the adapter into its base first "
            "(peft: merge_and_unload, save_pretrained)."
        )
    policy.model.requires_grad_(False)
    adapters = PeftAdapters(policy.model, frozen)
    spec = lora or LoraSpec()
    with seeded(spec.seed):
        for name, source in sources.items():
            adapters.add(name, source or spec)
    return {name: replace(policy, peft=adapters.peft, adapters=adapters, adapter=name) for name in adapters.names}


def _wrap(model: Any, key: str, config: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(model, config, adapter_name=key)


def _config_in(source: str) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_pretrained(source)


def _load(peft: Any, name: str, source: str) -> None:
    try:
        peft.load_adapter(source, _key(name), is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"The adapter of policy '{name}' in {source} does not fit the base model: {error}") from error


def _key(name: str) -> str:
    """peft's name for a policy's adapter; its own words (`default`, parts of `lora_`) cannot be hit."""
    return f"policy_{name}"


_SPARE = 4
"""So many adapters stay joined though a pass needs fewer of them."""


class NotByRow(Exception):
    """A layer was given something other than rows of tokens."""


@dataclass(frozen=True, slots=True)
class Joined:
    """The adapters of one layer. `owners` [K] says which adapter's each rank is."""

    down: torch.Tensor
    up: torch.Tensor
    ranks: tuple[int, ...]
    owners: torch.Tensor


class _ByRow:
    """Adapters of the tuner layers of a `PeftModel`, by peft's names of them."""

    def __init__(self, peft: Any, layers: Sequence[Any]) -> None:
        self._peft = peft
        self._layers = layers
        self._gives_rows: bool | None = None
        self._mixes: dict[str, bool] = {}
        self._names: list[str] = []
        self._joined: list[Joined | None] = []

    def changed(self) -> None:
        """Weights of adapters have changed: what was joined is not used again."""
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
        """Join these adapters. Of those that were needed before only a few stay, so that copies are few."""
        if needed <= {*self._names} and len(self._names) <= max(_SPARE, 2 * len(needed)):
            return
        kept = needed.union(self._names)
        names = sorted(kept if len(kept) <= _SPARE else needed)
        with torch.no_grad():
            joined = [_join(layer, names) for layer in self._layers]
        self._names, self._joined = names, joined

    def _replace(self, adapter_R: torch.Tensor) -> None:
        """Replace the layers' own forward, which knows one adapter for all rows, for one pass."""
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
