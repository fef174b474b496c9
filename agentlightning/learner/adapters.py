"""Several policies on one base model: named LoRA adapters in one `PeftModel`.

The base is in memory once, for all policies, their engine and their learners; it never changes. Whoever computes for
one policy activates it first (`Policy.activate`); who computes for several at once says whose each row is (`rows`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from agentlightning.errors import ConfigError, ModelError
from agentlightning.learner.by_row import ByRow
from agentlightning.learner.policy import (
    LoraSpec,
    Policy,
    load_policy,
    lora_config,
    peft_calls_deprecated_names,
    seeded,
    take_up_adapter,
)


class PeftAdapters:
    """The adapters of one base model by policy, and which of them the layers compute with."""

    def __init__(self, peft: Any, names: Sequence[str], frozen: str | None = None) -> None:
        """`names[0]` is active in `peft`; `frozen` is one more: the base without an adapter."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        self.names = [*names] if frozen is None else [*names, frozen]
        self._frozen = frozen
        self._peft = peft
        self._active = names[0]
        # peft's own `set_adapter` walks all modules of the model, which would cost a good part of a small one's step.
        self._layers = [module for module in peft.modules() if isinstance(module, BaseTunerLayer)]
        self._by_row = ByRow(peft, self._layers)

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
        self._peft.save_pretrained(directory, selected_adapters=[key])
        for file in (directory / key).iterdir():
            file.rename(directory / file.name)
        shutil.rmtree(directory / key)

    def take_up(self, name: str, directory: str) -> None:
        """Give an adapter the weights of the one in a directory, which must be of its shape."""
        if name == self._frozen:
            raise ConfigError("This policy is the base model, which takes up no adapter.")
        take_up_adapter(self._peft, _key(name), directory)


def load_policies(
    base: str | Path,
    sources: Mapping[str, str | None],
    *,
    frozen: str | None = None,
    lora: LoraSpec | None = None,
    device: str = "auto",
    dtype: str = "float32",
) -> dict[str, Policy]:
    """Policies by name on one base model, each a new adapter (None) or the one in a directory.

    `frozen` is the name of one more: the base itself, which has nothing to train. Raises ModelError for a base that is
    an adapter itself or an adapter that does not fit it.
    """
    first, *others = sources
    policy = load_policy(base, device=device, dtype=dtype)
    if policy.peft is not None:
        raise ModelError(
            f"'{base}' is an adapter; several policies need a base model. Merge the adapter into its base first "
            "(peft: merge_and_unload, save_pretrained)."
        )
    for name, source in sources.items():
        if source is not None and not (Path(source) / "adapter_config.json").is_file():
            raise ModelError(
                f"There is no adapter for the policy '{name}' in {source}. Give the directory that a checkpoint holds "
                "for each policy: checkpoints/step-…/model/<policy>."
            )
    spec = lora or LoraSpec()
    with peft_calls_deprecated_names(), seeded(spec.seed):
        peft = _wrap(policy, first, _config(sources[first], spec))
        for name in others:
            peft.add_adapter(_key(name), _config(sources[name], spec))
        for name, source in sources.items():
            if source is not None:
                _load(peft, name, source)
    peft.eval()
    peft.set_adapter(_key(first))
    adapters = PeftAdapters(peft, list(sources), frozen)
    return {name: replace(policy, peft=peft, adapters=adapters, adapter=name) for name in adapters.names}


def _wrap(policy: Policy, name: str, config: Any) -> Any:
    from peft import get_peft_model

    return get_peft_model(policy.model, config, adapter_name=_key(name))


def _config(source: str | None, spec: LoraSpec) -> Any:
    from peft import PeftConfig

    return lora_config(spec) if source is None else PeftConfig.from_pretrained(source)


def _load(peft: Any, name: str, source: str) -> None:
    try:
        peft.load_adapter(source, _key(name), is_trainable=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"The adapter of policy '{name}' in {source} does not fit the base model: {error}") from error


def _key(name: str) -> str:
    """peft's name for a policy's adapter; its own words (`default`, parts of `lora_`) cannot be hit."""
    return f"policy_{name}"
