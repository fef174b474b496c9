"""A model's size, read from its config.json without loading the model: for defaults, and for what fits where.

Counts are those of the usual decoder (attention with grouped keys, a gated MLP or experts): right within a few percent,
good enough to choose a learning rate or to see that a model does not fit. Sizes that people speak of by their number
alone (`8B`) are those of widely used open models.

The Hugging Face hub is asked with limits of our own: left alone, its client tries for half a minute to reach a host
that is not there, and for a name that was a typo.
"""

from __future__ import annotations

import math
import re
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from agentlightning.errors import ModelError
from agentlightning.models import base_of_adapter, resolve_model
from agentlightning.reading import read_object

BYTES_OF = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}

LOGPROB_GAP = 1e-3
"""For most models, the largest difference between two correct ways to compute a log-prob in float32."""
_LARGEST = {
    **dict.fromkeys(("hidden_size", "num_attention_heads", "head_dim", "num_key_value_heads", "vocab_size"), 2**31),
    **dict.fromkeys(("num_local_experts", "num_experts", "num_experts_per_tok"), 2**31),
    **dict.fromkeys(("moe_intermediate_size", "intermediate_size"), 2**31),
    **dict.fromkeys(("num_hidden_layers", "num_labels"), 10**6),
}
"""Of what a configuration counts: what reads one makes a list of the layers, and of the labels."""
_MOST_PER_BYTE = 1000
"""Parameters, by a configuration, for each byte of the weights: two where they have four bits, and more where layers
share them."""
FOR_ADAPTER = 20
"""How many times the learning rate for all weights a LoRA adapter gets."""
SMALL_MODEL, MOST_FOR_SMALL = 3e7, 3.4
"""Below so many parameters the learning rate grows with the root of how many times smaller a model is, up to this
factor."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a model."""

    hidden: int
    """Width of the residual stream."""
    layers: int
    parameters: int
    max_context: int | None
    """The longest sequence that the model was made for; None where its configuration does not say."""
    adapter: bool = False
    """The directory holds a LoRA adapter of the model, not the model."""
    query: int = 0
    """Width of all query heads together; 0: as wide as the residual stream, as are `keys` and a quarter of `inner`."""
    keys: int = 0
    """Width of all key heads together, and of the value heads."""
    inner: int = 0
    """Width inside the MLP that one token goes through, its experts together."""
    vocabulary: int = 0
    active: int = 0
    """Parameters that one token is multiplied with, where experts are chosen; 0: all of them."""
    delta_nets: bool = False
    """Some layers are gated delta nets, which amplify rounding more than attention does."""
    looked_up: int = 0
    """Input embeddings, where the output layer has its own: no token is multiplied with them."""

    @property
    def kv_numbers(self) -> int:
        """Keys and values of one token, in all layers."""
        return 2 * self.layers * (self.keys or self.hidden)

    @property
    def logprob_gap(self) -> float:
        """How far two right ways to compute a log-prob in float32 may be apart.

        Ten times as far for gated delta nets: when their weights move by as much as float32 rounds them, the model's
        own log-probs move by ten times as much as those of attention (`tests/learner/test_conditioning.py`).
        """
        return 1e-2 if self.delta_nets else LOGPROB_GAP

    def activation_numbers(self, tokens: int) -> int:
        """What the layers keep of a pass of so many tokens for its gradient, without the attention scores.

        Per layer: around the two norms 4 times the residual stream each; query, key, value and output before and after
        norm and rotation; gate, its activation, up and their product. That is what autograd saves of transformers' own
        forward in float32 (`tests/models/test_plan.py` counts it). The formula of Korthikanti et al. (arXiv 2205.05198,
        eq. 2: 34 bytes per token and unit of width, 17 numbers) is of fused kernels, and half of it.
        """
        query, keys, inner = self.query or self.hidden, self.keys or self.hidden, self.inner or 4 * self.hidden
        return tokens * self.layers * (8 * self.hidden + 4 * (query + keys) + 4 * inner)

    def learning_rate(self, *, adapter: bool) -> float:
        """A step size of Adam for reinforcement learning, to begin with: two significant digits.

        1e-6 for all weights of a model 4096 wide and 30 layers deep, as DeepSeekMath 7B was trained with GRPO
        (arXiv 2402.03300, section 4.2). Adam's best step falls with the width (Yang et al., arXiv 2203.03466, table 3)
        and with the root of the depth (Yang et al., arXiv 2310.02244). A LoRA adapter wants ten times as much or more,
        whatever its rank (Schulman et al., "LoRA Without Regret", Thinking Machines Lab, 2025): with twenty times two
        models learned more than with ten, and with more than that `max_kl` begins to halve steps. All weights of a
        model below 30 million parameters want more, too: these are random, or learned little that could be lost. The
        figures are in docs/algorithms.md.
        """
        large = 1e-6 * (4096 / self.hidden) * math.sqrt(30 / self.layers)
        if adapter or self.adapter:
            return float(f"{large * FOR_ADAPTER:.1e}")
        small = min(max((SMALL_MODEL / max(self.parameters, 1)) ** 0.5, 1.0), MOST_FOR_SMALL)
        return float(f"{large * small:.1e}")

    def training_bytes(self, dtype: str, *, adapter: bool, offload: bool = False) -> int:
        """What weights, gradients and AdamW's two moments take; activations and the KV cache come on top. `offload`:
        what they take of a GPU, when the moments are not there.

        Short types are trained through float32 copies. An adapter's own numbers are small beside the frozen weights.
        """
        each = BYTES_OF[dtype]
        if adapter or self.adapter:
            return int(self.parameters * each * 1.05)
        if offload:
            return self.parameters * 2 * each
        trained = 3 * max(each, 4) + (0 if each >= 4 else 4)  # gradient and two moments, and the copy
        return self.parameters * (each + trained)


def read_shape(model: str | Path) -> ModelShape | None:
    """The shape of a shipped model, a directory or a Hugging Face id; None without a config.json that is understood.

    Raises ModelError for a name without a model, or with one that cannot be reached from here.
    """
    place = resolve_model(model)
    adapter = Path(place) / "adapter_config.json"
    if adapter.is_file():
        with base_of_adapter(Path(place)) as name:
            base = read_shape(name)
        return base and replace(base, adapter=True)
    file = Path(place) / "config.json" if Path(place).is_dir() else _config_from_hub(place)
    try:
        return None if file is None else shape_of(read_object(file))
    except (KeyError, TypeError, ValueError, OSError):
        return None


def refuse_sizes(folder: Path) -> None:
    """Raises ModelError where a model's config.json says far more numbers than its weights can hold: to make place for
    them takes all memory, or hours."""
    try:
        parameters = shape_of(read_object(folder / "config.json")).parameters
    except ValueError as error:
        raise ModelError(f"The config.json in {folder} cannot be used: {error}. Get the model's file again.") from None
    except (KeyError, TypeError, OSError):  # another architecture's
        return
    held = sum(file.stat().st_size for file in folder.iterdir() if file.suffix in (".safetensors", ".bin"))
    if held and parameters > _MOST_PER_BYTE * held:
        raise ModelError(
            f"The config.json in {folder} says {count_of(parameters)} parameters, and its weights have {held:,} bytes. "
            "Take both from one model."
        )


def shape_of(config: dict[str, Any]) -> ModelShape:
    """The shape in a configuration as `transformers` writes it; of a model with pictures or sounds its text part.

    Raises KeyError, TypeError or ValueError for a configuration that says no sizes, or none that a model can have.
    """
    _check_sizes(config)
    _check_sizes(config := config.get("text_config", config))
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads = config["num_attention_heads"]
    if not hidden or not layers or not heads:
        raise TypeError("hidden_size, num_hidden_layers or num_attention_heads says nothing")
    head = config.get("head_dim") or hidden // heads
    keys = config.get("num_key_value_heads") or heads
    attention = hidden * head * (2 * heads + 2 * keys)
    experts = config.get("num_local_experts") or config.get("num_experts") or 1
    inner = config.get("moe_intermediate_size") or config.get("intermediate_size") or 4 * hidden
    embeddings = config["vocab_size"] * hidden * (1 if config.get("tie_word_embeddings", True) else 2)
    parameters = layers * (attention + 3 * hidden * inner * experts) + embeddings
    chosen = min(experts, config.get("num_experts_per_tok") or experts)
    return ModelShape(
        hidden,
        layers,
        parameters,
        context if isinstance(context := config.get("max_position_embeddings"), int) and context > 0 else None,
        query=head * heads,
        keys=head * keys,
        inner=inner * chosen,
        vocabulary=config["vocab_size"],
        active=layers * (attention + 3 * hidden * inner * chosen) + config["vocab_size"] * hidden,
        delta_nets="linear_key_head_dim" in config,
        looked_up=embeddings - config["vocab_size"] * hidden,
    )


def _check_sizes(config: Any) -> None:
    if not isinstance(config, dict):
        raise TypeError("it is no object")
    for name in _LARGEST.keys() & config.keys():
        if type(size := config[name] or 0) is not int:
            raise TypeError(f"{name} is no whole number")
        if not 0 <= size < _LARGEST[name]:
            raise ValueError(f"{name} is {size}, which no model has")


def count_of(parameters: int) -> str:
    """The number for people, in millions or billions."""
    return f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.1f} million"


def _decoder(hidden: int, layers: int, heads: int, keys: int, inner: int, *, tied: bool, **more: int) -> ModelShape:
    return shape_of(
        {
            "hidden_size": hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": keys,
            "head_dim": 128,
            "intermediate_size": inner,
            "vocab_size": 151_936,
            "tie_word_embeddings": tied,
            "max_position_embeddings": 40_960,
            **more,
        }
    )


SIZES = {
    "135m": _decoder(576, 30, 9, 3, 1536, tied=True, head_dim=64, vocab_size=49_152, max_position_embeddings=8192),
    "0.6b": _decoder(1024, 28, 16, 8, 3072, tied=True),
    "1.7b": _decoder(2048, 28, 16, 8, 6144, tied=True),
    "4b": _decoder(2560, 36, 32, 8, 9728, tied=True),
    "8b": _decoder(4096, 36, 32, 8, 12_288, tied=False),
    "14b": _decoder(5120, 40, 40, 8, 17_408, tied=False),
    "30b-a3b": _decoder(
        2048, 48, 32, 4, 6144, tied=False, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    ),
    "32b": _decoder(5120, 64, 64, 8, 25_600, tied=False),
    "70b": _decoder(8192, 80, 64, 8, 28_672, tied=False, vocab_size=128_256, max_position_embeddings=131_072),
}
"""Qwen3's, but for 135m (SmolLM2) and 70b (Llama 3)."""

TRIED = {"HuggingFaceTB/SmolLM2-135M-Instruct": ("135m", "agl demo sentiment trains an adapter on it")}
"""Hugging Face ids whose weights were trained here: their size, and by what."""


def is_size(model: str) -> bool:
    """Whether this is a size, and no folder of that name."""
    return model.lower() in SIZES and not Path(model).exists()


def known_shape(model: str) -> ModelShape:
    """The shape of a size such as `8B`, a shipped model, a directory or a Hugging Face id.

    Raises ModelError for what is none of these, or has no configuration that can be understood.
    """
    if is_size(model):
        return SIZES[model.lower()]
    if re.fullmatch(r"\d+(\.\d+)?[bm]", model.lower()) and not Path(model).exists():
        raise ModelError(f"There is no size {model!r} here. Give the next larger one: {', '.join(SIZES)}.")
    shape = read_shape(model)
    if shape is None:
        raise ModelError(
            f"The configuration of '{model}' does not say its sizes. Give a size instead: {', '.join(SIZES)}."
        )
    return shape


_HUB_SECONDS = 5.0


def _config_from_hub(name: str) -> Path | None:
    """The config.json of a Hugging Face id, from the cache or downloaded; None where the hub's client is not installed.

    Raises ModelError that says why it cannot be had.
    """
    try:
        from huggingface_hub import constants, hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, HFValidationError, RepositoryNotFoundError
    except ImportError:
        return None
    try:
        cached = try_to_load_from_cache(name, "config.json")
        if isinstance(cached, str):
            return Path(cached)
        if constants.HF_HUB_OFFLINE:
            raise _not_here(name, "and HF_HUB_OFFLINE=1 forbids to look for it on the Hugging Face hub")
        if not _reachable(constants.ENDPOINT):
            raise _not_here(name, f"and the Hugging Face hub ({constants.ENDPOINT}) cannot be reached from here")
        return Path(hf_hub_download(name, "config.json", etag_timeout=_HUB_SECONDS))
    except GatedRepoError:
        raise ModelError(
            f"'{name}' could not be loaded: its owners ask who uses it. Accept their terms at "
            f"{constants.ENDPOINT}/{name}, then run: hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise _not_here(name, "nor on the Hugging Face hub (or it is private: hf auth login)") from None
    except (HFValidationError, HfHubHTTPError, OSError) as error:
        raise _not_here(name, f"and the hub answered: {str(error).splitlines()[0]}") from None


def _not_here(name: str, why: str) -> ModelError:
    folder = Path(name).parent
    mistyped = f" The folder '{folder}' is here, but there is no '{Path(name).name}' in it." if folder.is_dir() else ""
    return ModelError(
        f"The model '{name}' could not be loaded: it is neither in this directory nor downloaded, {why}.{mistyped} "
        "Check the name, or give a directory with a model, or 'calc', which ships with the package."
    )


def _reachable(endpoint: str) -> bool:
    """Whether the host answers at all. Behind a proxy only the proxy knows."""
    if getproxies():
        return True
    url = urlsplit(endpoint)
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        with socket.create_connection((url.hostname or "", port), timeout=_HUB_SECONDS):
            return True
    except OSError:
        return False
