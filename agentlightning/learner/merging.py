"""A policy as one plain model: an adapter merged into its base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedModel

from agentlightning.errors import ModelError
from agentlightning.files import atomic_directory
from agentlightning.learner.policy import METADATA_FILE, load_model

_OTHER_FILES = (METADATA_FILE, "chat_template.jinja", "generation_config.json")


def merged(path: Path) -> PreTrainedModel:
    """The whole model in a directory, on the CPU, in the short type it is kept in, if it is kept in one.

    An adapter is merged in float32, so that a small change of large weights is not lost twice.
    """
    model = load_model(str(path), "float32")
    kept = _dtype(model)
    model.config.dtype = kept
    return model.to(kept)  # pyright: ignore[reportArgumentType]


def export_merged(source: Path, to: Path) -> None:
    """Write the model that `merged` gives, with its tokenizer, as a Hugging Face directory, all or nothing.

    Raises ModelError where it cannot be loaded.
    """
    try:
        model, tokenizer = merged(source), AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"The model in {source} cannot be loaded: {error}") from error
    with atomic_directory(to, shared=True) as directory:
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)
        for name in _OTHER_FILES:
            if (source / name).is_file() and not (directory / name).exists():
                shutil.copy(source / name, directory)


def _dtype(model: PreTrainedModel) -> torch.dtype:
    """What the base's own weights are kept in."""
    config: Any = AutoConfig.from_pretrained(str(model.config.name_or_path), trust_remote_code=False)
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float32
