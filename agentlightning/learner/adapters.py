"""Several policies on one base model: named LoRA adapters in one `PeftModel`, of which one at a time is in the layers.

The base is in memory once, for all policies, their engines and their learners; it never changes. Whoever computes for a
policy activates it first (`Policy.activate`).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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


class PeftAdapters:
    """The adapters of one base model by policy, and which of them the layers compute with."""

    def __init__(self, peft: Any, names: Sequence[str]) -> None:
        """`names[0]` is active in `peft`."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        self._peft = peft
        self._active: str | None = names[0]
        # peft's own `set_adapter` walks all modules of the model, which would cost a good part of a small one's step.
        self._layers = [module for module in peft.modules() if isinstance(module, BaseTunerLayer)]

    def use(self, name: str | None) -> None:
        """Compute with this policy's adapter from now on, and let its parameters alone take gradients; None: the base
        without an adapter, where nothing does.
        """
        if name == self._active:
            return
        for layer in self._layers:
            if name is not None:
                layer.set_adapter(_key(name))
            if name is None or self._active is None:
                layer.enable_adapters(name is not None)
        self._active = name

    def save(self, name: str | None, directory: Path) -> None:
        """Write one adapter as a PEFT directory that loads on the base."""
        if name is None:
            raise ConfigError("This policy is the base model, which is not trained and so not saved.")
        key = _key(name)
        self._peft.save_pretrained(directory, selected_adapters=[key])
        for file in (directory / key).iterdir():
            file.rename(directory / file.name)
        shutil.rmtree(directory / key)

    def take_up(self, name: str | None, directory: str) -> None:
        """Give an adapter the weights of the one in a directory, which must be of its shape."""
        if name is None:
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
    adapters = PeftAdapters(peft, list(sources))
    found = {name: replace(policy, peft=peft, adapters=adapters, adapter=name) for name in sources}
    return found if frozen is None else {**found, frozen: replace(policy, peft=peft, adapters=adapters, adapter=None)}


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
