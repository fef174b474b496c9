"""A policy: a trainable Hugging Face model, all its weights or one LoRA adapter, with a weight version.

Loads any Hugging Face id or directory, and exports a policy as one plain model, with its adapter merged into the base.
Knows nothing of how tokens are sampled or which loss is used.
"""

from __future__ import annotations

import difflib
import json
import shutil
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from agentlightning.errors import AgentLightningError, ConfigError, ModelError
from agentlightning.files import atomic_directory
from agentlightning.models import base_of_adapter, resolve_model
from agentlightning.models.shape import refuse_sizes
from agentlightning.models.weights import damage_of, damage_of_checkpoint
from agentlightning.reading import read_object
from agentlightning.tokenizer_growth import panics_named, refuse_growth, token_ids

METADATA_FILE = "agentlightning.json"
"""The file beside the weights with what this package needs to know of a model (which renderer, …)."""

_ALONE, _REFERENCE = "default", "reference"
"""peft's names for the adapter of a policy that is alone, and for the one it is compared with."""


@dataclass(frozen=True, slots=True)
class LoraSpec:
    """A low-rank adapter instead of all weights (Hu et al., arXiv 2106.09685)."""

    rank: int = 16
    alpha: int = 32
    target_modules: str | list[str] = "all-linear"
    seed: int = 0
    """The seed of a new adapter's weights."""
    parts: tuple[str, ...] = ()
    """Some of `learner.adapters.PARTS`, which several policies have instead of `target_modules`."""


class PolicyAdapters(Protocol):
    """The adapters of several policies on one model; see `learner.adapters`."""

    names: list[str]
    peft: Any

    def add(self, name: str, source: str | LoraSpec) -> None: ...

    def remove(self, name: str) -> None: ...

    def use(self, name: str) -> None: ...

    def mixes(self, name: str) -> bool: ...

    def rows(self, names: Sequence[str], which: np.ndarray) -> AbstractContextManager[None]: ...

    def changed(self) -> None: ...

    def save(self, name: str, directory: Path) -> None: ...

    def take_up(self, name: str, directory: str) -> None: ...


@dataclass(slots=True)
class Policy:
    """The model and what belongs to it. `model` is the causal LM itself; with LoRA its layers hold the adapter."""

    path: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    eos_ids: tuple[int, ...]
    version: int = 0
    peft: Any = None
    """The `PeftModel` around `model`, if the policy is an adapter."""
    metadata: dict[str, Any] = field(default_factory=dict)
    adapters: PolicyAdapters | None = None
    """Where several policies share `model`: all their adapters."""
    adapter: str = ""
    """Which of them is this policy's."""

    @property
    def device(self) -> torch.device:
        return self.model.device

    def activate(self) -> None:
        """Let `model` compute this policy, before anything is done with it. Nothing to do for one that is alone."""
        if self.adapters is not None:
            self.adapters.use(self.adapter)

    def trainable(self) -> list[torch.nn.Parameter]:
        """The parameters that the learner updates, in a fixed order."""
        return [p for p in self.model.parameters() if p.requires_grad]

    def add_reference(self, directory: str | Path) -> None:
        """Keep the adapter in a directory beside the one in training, for `reference`."""
        with peft_calls_deprecated_names():
            self.peft.load_adapter(str(directory), _REFERENCE)
        self.peft.set_adapter(_ALONE)

    def reference_pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Each weight of the adapter that is kept for `reference` with the trained adapter's. Where there is none yet,
        one is made that changes nothing.
        """
        if self.peft is None or self.adapters is not None:
            raise ConfigError("A reference that follows the policy is for one policy, of all weights or one adapter.")
        fresh = _REFERENCE not in self.peft.peft_config
        if fresh:
            with peft_calls_deprecated_names():
                self.peft.add_adapter(_REFERENCE, self.peft.peft_config[_ALONE])
            self.peft.set_adapter(_ALONE)
        named = dict(self.peft.named_parameters())
        kept = {n: p for n, p in named.items() if f".{_REFERENCE}." in n}
        pairs = [(p, named[n.replace(f".{_REFERENCE}.", f".{_ALONE}.")]) for n, p in kept.items()]
        if fresh:
            for (name, parameter), (_, trained) in zip(kept.items(), pairs, strict=True):
                parameter.data.copy_(trained.data if ".lora_A." in name else torch.zeros_like(parameter))
        return pairs

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within the block an adapter's model computes what it is compared with: the reference, or else the base."""
        if _REFERENCE not in self.peft.peft_config:
            with self.peft.disable_adapter():
                yield
            return
        self.peft.set_adapter(_REFERENCE)
        try:
            yield
        finally:
            self.peft.set_adapter(_ALONE)

    def take_up(self, directory: str, version: int | None = None) -> None:
        """Compute with the weights in a directory from now on, an adapter with those of an adapter. Raises ModelError
        where there are none, or none that fit."""
        if not Path(directory).is_dir():
            raise ModelError(f"The weights in {directory} cannot be read: there is no such directory any more.")
        if self.adapters is not None:
            self.adapters.take_up(self.adapter, directory)
        elif self.peft is not None:
            take_up_adapter(self.peft, _ALONE, directory)
        else:
            self._take_up_model(directory)
        self.version = self.version + 1 if version is None else version

    def _take_up_model(self, directory: str) -> None:
        try:
            weights = load_base(directory, self.model.dtype).state_dict()
            self.model.load_state_dict(weights)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"The weights in {directory} cannot be read: {_first_line(error)}") from error
        except (ValueError, KeyError, RuntimeError) as error:
            raise ModelError(f"The weights in {directory} do not fit '{self.path}': {_first_line(error)}") from error

    def export(self, path: str | Path) -> None:
        """Write the model (or the adapter) with its tokenizer as a Hugging Face directory, all or nothing."""
        with atomic_directory(Path(path)) as directory:
            if self.adapters is not None:
                self.adapters.save(self.adapter, directory)
            elif self.peft is not None:
                self.peft.save_pretrained(directory, selected_adapters=[_ALONE], save_embedding_layers=False)
            else:
                self.model.save_pretrained(directory)
            self.tokenizer.save_pretrained(directory)
            (directory / METADATA_FILE).write_text(json.dumps({**self.metadata, "version": self.version}, indent=2))
            template = Path(self.path) / "chat_template.jinja"
            if template.is_file() and not (directory / template.name).exists():
                shutil.copy(template, directory)


def take_up_adapter(peft: Any, key: str, directory: str) -> None:
    """Give the adapter that peft knows by `key` the weights of the one in a directory, which must be of its shape.
    Raises ModelError where it is not."""
    from peft import load_peft_weights, set_peft_model_state_dict

    try:
        weights = load_peft_weights(directory, device="cpu")
        set_peft_model_state_dict(peft, weights, adapter_name=key)
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"The adapter in {directory} does not fit '{key}': {error}") from error


def pick_device(device: str = "auto", dtype: str = "float32") -> torch.device:
    """`auto` is the GPU if there is one: CUDA's, else Apple's (`mps`), which has no float64. Raises ConfigError for a
    device that is not there, or that has not this dtype."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() and dtype != "float64" else "cpu")
    if device.startswith("mps") and dtype == "float64":
        raise ConfigError("The device 'mps' computes no float64. Choose dtype='float32', or device='cpu'.")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # the latter where torch was built without CUDA
        raise ConfigError(
            f"The device '{device}' cannot be used: {_first_line(error)}. Leave `device` out to take what there is."
        ) from error


def load_policy(
    name: str | Path, *, device: str = "auto", dtype: str = "float32", lora: LoraSpec | None = None
) -> Policy:
    """Load a policy from a shipped model's name, a directory, or a Hugging Face id.

    A directory that holds an adapter is loaded on its base model and trained further. `dtype` is a torch dtype's name;
    float32 is the default everywhere because the optimiser updates these very weights.

    Raises ModelError with the cause when there is no such model or it cannot be loaded.
    """
    path = resolve_model(name)
    target = pick_device(device, dtype)
    try:
        adapter = (Path(path) / "adapter_config.json").is_file()
        model, peft_model = _load_adapter(path, dtype) if adapter else (load_base(path, dtype), None)
        tokenizer = tokenizer_of(path)
        eos_ids, metadata = _eos_ids(model, tokenizer), _metadata(path)
    except AgentLightningError:
        raise
    except Exception as error:  # the libraries have no kind of error in common for files that are damaged
        raise ModelError(f"The model '{name}' could not be loaded: {_why_not(Path(path), error)}") from error
    if lora is not None and peft_model is None:
        model, peft_model = _add_lora(model, lora)
    model.to(target)  # pyright: ignore[reportArgumentType]
    model.eval()  # no dropout: log-probs of learner and engine must agree
    return Policy(
        path=path,
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        peft=peft_model,
        metadata=metadata,
    )


def _refuse_damage(path: str) -> None:
    """Raises ModelError where the files in a model's folder are not whole, before a library reads them."""
    if (words := _damage(Path(path))) is not None:
        raise ModelError(f"The model '{path}' could not be loaded: {words}")


def _damage(path: Path) -> str | None:
    if path.name == "model" and (words := damage_of_checkpoint(path.parent)) is not None:
        return words
    words = damage_of(path)
    return None if words is None else f"{words}. Copy or download it again."


def _why_not(path: Path, error: Exception) -> str:
    """Why a model could not be loaded, and what to look at."""
    if not path.is_dir():
        return (
            f"{_first_line(error)}\nCheck the name; a Hugging Face id needs a network connection or an earlier "
            "download."
        )
    if (words := _damage(path) or _unfit_kind(path)) is not None:
        return words
    return (
        f"{_first_line(error)}\n"
        "Check that the directory is whole: config.json, weights and tokenizer, as save_pretrained writes them."
    )


def _unfit_kind(path: Path) -> str | None:
    """What is said of a config.json whose model_type transformers does not know, or cannot let write text."""
    from transformers import CONFIG_MAPPING, __version__
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    try:
        config = read_object(path / "config.json")
    except (OSError, ValueError):
        return None
    kind = config.get("model_type")
    if not isinstance(kind, str):
        return "its config.json has no model_type, such as 'qwen3'. Copy the file from the model that it came from."
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return None
    if kind in CONFIG_MAPPING:
        return f"{kind!r} is no kind of model that goes on with a text (a causal LM), as 'qwen3' is. Take one."
    code = " Its code comes with it (auto_map), and code of models is never run here." if "auto_map" in config else ""
    near = difflib.get_close_matches(kind, list(CONFIG_MAPPING), n=1)
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return (
        f"its config.json says model_type {kind!r}, which transformers {__version__} does not know.{meant}{code} If "
        "the model is newer than that: pip install -U transformers. Else take another model."
    )


def load_model(path: str, dtype: str | torch.dtype) -> PreTrainedModel:
    """The causal LM in a directory, on the CPU, for scoring only; one that is an adapter is merged into its base."""
    if not (Path(path) / "adapter_config.json").is_file():
        return load_base(path, dtype)
    model, peft_model = _load_adapter(path, dtype)
    _untie(model)
    return peft_model.merge_and_unload()


def _untie(model: PreTrainedModel) -> None:
    """Where an output layer that has an adapter shares its weights with the embedding, give it weights of its own, so
    that merging changes that layer alone."""
    output: Any = model.get_output_embeddings()
    layer, config = getattr(output, "base_layer", None), model.config.get_text_config()
    if layer is not None and config.tie_word_embeddings:
        layer.weight = torch.nn.Parameter(layer.weight.detach().clone(), requires_grad=False)
        config.tie_word_embeddings = model.config.tie_word_embeddings = False


def tokenizer_of(path: str | Path) -> Any:
    """The tokenizer of a model, as transformers has it. Raises ModelError where it lets texts grow too much."""
    refuse_growth(Path(path))
    with panics_named(Path(path)):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)


def refuse_other_tokens(policy: Policy, path: str) -> None:
    """Raises ModelError where the model in a directory, or its base, has another vocabulary than the policy."""
    tokenizer = policy.tokenizer if path == policy.path else tokenizer_of(path)
    if tokenizer.get_vocab() != policy.tokenizer.get_vocab():
        raise ModelError(
            f"The model '{path}' has other tokens than '{policy.path}', so it cannot say how likely it finds what that "
            "one samples. Take one of the same family."
        )


def load_base(path: str, dtype: str | torch.dtype) -> PreTrainedModel:
    """The causal LM in a directory, on the CPU; `dtype` is a torch dtype or its name."""
    _refuse_damage(path)
    if Path(path).is_dir():
        refuse_sizes(Path(path))
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for name in ("_attn_implementation", "_experts_implementation"):
        if "/" in (named := str(getattr(config, name, ""))):
            raise ModelError(f"The config.json in {path} names code of a hub: {named}. Take it out; models are data.")
    if config.model_type in MODEL_FOR_MASKED_LM_MAPPING_NAMES and not getattr(config, "is_decoder", False):
        raise ModelError(
            f"{path} is an encoder ({config.model_type}), which fills in words and does not write. Give a model that "
            "writes text, such as Qwen/Qwen3-0.6B."
        )
    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        path, config=config, dtype=kind, trust_remote_code=False, output_loading_info=True
    )
    model, found = loaded
    if missing := sorted(found["missing_keys"]):
        raise ModelError(
            f"The weights in {path} are not those of its config.json: {missing[0]} is missing (one of {len(missing)}), "
            "and would be random. Take both files from one model that writes text: no classifier, no embeddings."
        )
    return model


def _load_adapter(path: str, dtype: str | torch.dtype) -> tuple[PreTrainedModel, Any]:
    from peft import PeftModel

    _refuse_damage(path)
    with base_of_adapter(Path(path)) as name:
        base = load_base(resolve_model(name), dtype)
    with peft_calls_deprecated_names():
        peft_model = PeftModel.from_pretrained(base, path, is_trainable=True)
    return peft_model.get_base_model(), peft_model  # pyright: ignore[reportReturnType]


def _add_lora(model: PreTrainedModel, spec: LoraSpec) -> tuple[PreTrainedModel, Any]:
    from peft import get_peft_model

    with peft_calls_deprecated_names(), seeded(spec.seed):
        peft_model = get_peft_model(model, lora_config(spec))
    return peft_model.get_base_model(), peft_model  # pyright: ignore[reportReturnType]


def lora_config(spec: LoraSpec) -> Any:
    """What peft calls it."""
    from peft import LoraConfig

    return LoraConfig(
        r=spec.rank,
        lora_alpha=spec.alpha,
        target_modules=spec.target_modules,
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
    )


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Within the block what is drawn on the CPU, where adapters are made, follows from the seed alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@contextmanager
def peft_calls_deprecated_names() -> Iterator[None]:
    """peft 0.21 still uses a name that transformers 5.23 warns about, and warns of an adapter of an output layer that
    shares its weights (see `_untie`); users can do nothing about either."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Model has `tie_word_embeddings=True`", category=UserWarning)
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing.*", category=FutureWarning)
        yield


def _eos_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    generation = model.generation_config
    eos = generation.eos_token_id if generation is not None else None
    if eos is None:
        eos = tokenizer.eos_token_id
    if eos is None:
        raise ModelError(
            f"The model '{model.config.name_or_path}' names no end-of-sequence token, so it would never stop. "
            "Set eos_token_id in its generation_config.json."
        )
    return tuple(token_ids(eos, f"eos_token_id of {model.config.name_or_path}"))


def _metadata(path: str) -> dict[str, Any]:
    file = Path(path) / METADATA_FILE
    return read_object(file) if file.exists() else {}


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


_OTHER_FILES = (METADATA_FILE, "chat_template.jinja", "generation_config.json")


def merged(path: Path) -> PreTrainedModel:
    """The whole model in a directory, on the CPU, in the dtype that its base is kept in.

    An adapter is merged in float32, so that a small change of large weights is not lost twice.
    """
    model = load_model(str(path), "float32")
    kept = _dtype(model)
    model.config.dtype = kept
    return model.to(kept)  # pyright: ignore[reportArgumentType]


def merged_with_tokenizer(source: Path) -> tuple[PreTrainedModel, Any]:
    """The model that `merged` gives, and its tokenizer. Raises ModelError where they cannot be loaded."""
    try:
        return merged(source), tokenizer_of(source)
    except AgentLightningError:
        raise
    except Exception as error:  # as in load_policy
        raise ModelError(f"The model in {source} cannot be loaded: {error}") from error


def export_merged(source: Path, to: Path) -> None:
    """Write the model that `merged` gives, with its tokenizer, as a Hugging Face directory, all or nothing.

    Raises ModelError where it cannot be loaded.
    """
    model, tokenizer = merged_with_tokenizer(source)
    with atomic_directory(to, shared=True) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        for name in _OTHER_FILES:
            if (source / name).is_file() and not (directory / name).exists():
                shutil.copy(source / name, directory)


def _dtype(model: PreTrainedModel) -> torch.dtype:
    """The dtype that the base's own weights are kept in."""
    config: Any = AutoConfig.from_pretrained(str(model.config.name_or_path), trust_remote_code=False)
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
