"""GGUF: a model as one file for llama.cpp, Ollama and LM Studio. Written with llama.cpp's own `gguf` package.

Weights stay what they are (float32, or bfloat16 where the model is kept in a short type); llama.cpp's `llama-quantize`
makes smaller ones of the file. Architectures: Llama (Mistral too), Qwen2 and Qwen3, with byte-level BPE tokenizers. For
any other one this refuses, and says how llama.cpp's converter does it from the merged folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from agentlightning.errors import ConfigError, ModelError
from agentlightning.learner.policy import merged_with_tokenizer

ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
"""By the model type of a Hugging Face configuration, the name in `gguf.MODEL_ARCH`."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {_WORDS % r"\p{N}": "qwen2", _WORDS % r"\p{N}{1,3}": "llama-bpe"}
"""By the pattern that cuts text before BPE, llama.cpp's name for it."""
_ADVICE = (
    "Export it with --merged, and let llama.cpp's own converter make the file: "
    "python llama.cpp/convert_hf_to_gguf.py FOLDER (https://github.com/ggml-org/llama.cpp)."
)


def export_gguf(source: Path, to: Path) -> None:
    """Write the model in a directory, an adapter merged into its base, as the file `to`; it is there when it is whole.

    Raises ConfigError without the package `gguf`, and ModelError for a model that cannot be written so.
    """
    try:
        import gguf  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ConfigError("Writing GGUF needs llama.cpp's package: pip install gguf.") from None
    model, tokenizer = merged_with_tokenizer(source)
    config: Any = model.config
    arch = _architecture(config)
    vocabulary = _vocabulary(gguf, tokenizer, config.vocab_size)
    part = to.with_name(f"{to.name}.part")
    writer: Any = gguf.GGUFWriter(part, gguf.MODEL_ARCH_NAMES[getattr(gguf.MODEL_ARCH, arch)])
    short = next(model.parameters()).dtype.itemsize < 4
    _describe(writer, gguf, config, short=short)
    for add, value in vocabulary:
        getattr(writer, f"add_{add}")(value)
    for name, tensor in _tensors(gguf, model, arch):
        _add(writer, gguf, name, tensor, short=short)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.replace(to)


def _architecture(config: Any) -> str:
    arch = ARCHITECTURES.get(config.model_type)
    if arch is None:
        raise ModelError(f"Models of type '{config.model_type}' cannot be written as GGUF here. {_ADVICE}")
    rope = (config.rope_parameters or {}).get("rope_type", "default")
    if rope != "default":
        raise ModelError(f"Position embeddings of type '{rope}' cannot be written as GGUF here. {_ADVICE}")
    return arch


def _describe(writer: Any, gguf: Any, config: Any, *, short: bool) -> None:
    heads = config.num_attention_heads
    head_size = getattr(config, "head_dim", None) or config.hidden_size // heads
    writer.add_name(Path(config.name_or_path).name or "policy")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16 if short else gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_rope_dimension_count(head_size)
    writer.add_rope_freq_base(float(config.rope_parameters["rope_theta"]))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


# ---- weights ---------------------------------------------------------------------------------------------------------


def _tensors(gguf: Any, model: PreTrainedModel, arch: str) -> Iterator[tuple[str, torch.Tensor]]:
    """By their names in GGUF. Tied output weights are left out, as llama.cpp wants it."""
    config: Any = model.config
    names = gguf.get_tensor_name_map(getattr(gguf.MODEL_ARCH, arch), config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ModelError(f"GGUF has no name for the weights '{name}' of this model. {_ADVICE}")
        if arch == "LLAMA" and ".q_proj." in name:
            tensor = _interleaved(tensor, config.num_attention_heads)
        elif arch == "LLAMA" and ".k_proj." in name:
            tensor = _interleaved(tensor, config.num_key_value_heads)
        yield found, tensor


def _interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp rotates neighbouring numbers of a Llama's head, Hugging Face those half a head apart."""
    halves = tensor.reshape(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def _add(writer: Any, gguf: Any, name: str, tensor: torch.Tensor, *, short: bool) -> None:
    """Vectors are float32 always; matrices bfloat16 in a model of a short type."""
    array = tensor.detach().float().contiguous().numpy()
    if short and array.ndim > 1:
        kind = gguf.GGMLQuantizationType.BF16
        writer.add_tensor(name, gguf.quants.quantize(array, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, array.astype(np.float32))


# ---- the tokenizer ---------------------------------------------------------------------------------------------------


def _vocabulary(gguf: Any, tokenizer: Any, size: int) -> Iterator[tuple[str, Any]]:
    """What is written of the tokenizer: the name of the writer's `add_…`, and the value."""
    tokenizer_json = json.loads(tokenizer.backend_tokenizer.to_str())
    if tokenizer_json["model"]["type"] != "BPE" or not tokenizer_json["model"].get("vocab"):
        raise ModelError(
            f"A tokenizer of type {tokenizer_json['model']['type']} cannot be written as GGUF here. {_ADVICE}"
        )
    split = _split(tokenizer_json["pre_tokenizer"])
    added = {token["id"]: token for token in tokenizer_json["added_tokens"]}
    by_id = {number: text for text, number in tokenizer_json["model"]["vocab"].items()}
    by_id |= {number: token["content"] for number, token in added.items()}
    kinds = gguf.TokenType
    yield "tokenizer_model", "gpt2"
    yield "tokenizer_pre", split
    yield "token_list", [by_id.get(n, f"[PAD{n}]") for n in range(size)]
    yield "token_types", [_kind(kinds, n in by_id, added.get(n)) for n in range(size)]
    yield "token_merges", [m if isinstance(m, str) else " ".join(m) for m in tokenizer_json["model"]["merges"]]
    for name in ("bos", "eos", "pad"):
        number = getattr(tokenizer, f"{name}_token_id")
        if number is not None:
            yield f"{name}_token_id", number
    yield "add_bos_token", False  # the chat template says it where it belongs
    if tokenizer.chat_template:
        yield "chat_template", tokenizer.chat_template


def _kind(kinds: Any, known: bool, added: Mapping[str, Any] | None) -> int:
    if not known:
        return kinds.UNUSED
    if added is None:
        return kinds.NORMAL
    return kinds.CONTROL if added["special"] else kinds.USER_DEFINED


def _split(given: Mapping[str, Any] | None) -> str:
    """llama.cpp's name for how text is cut before BPE."""
    steps = (given or {}).get("pretokenizers") or [given or {}]
    kinds = [step.get("type") for step in steps]
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if kinds == ["Split", "ByteLevel"] and patterns[0] in _SPLITS:
        return _SPLITS[patterns[0]]
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm"
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    raise ModelError(
        f"How this tokenizer cuts text ({patterns or kinds}) has no name in GGUF that is known here. {_ADVICE}"
    )
