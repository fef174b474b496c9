"""Models that ship with the package, and how a model's name becomes a place to load it from. Knows nothing of torch."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentlightning.arguments import explained
from agentlightning.errors import ModelError
from agentlightning.files import no_path, run_called
from agentlightning.models.weights import damage_of_checkpoint
from agentlightning.reading import read_object

_HERE = Path(__file__).parent
_OF_PROVIDERS = re.compile(
    r"((openai|azure|anthropic|google)/)?(gpt-[345](?!.*oss)|o[1-9](-|$)|claude-|gemini-)[\w.:-]*$", re.IGNORECASE
)
KNOWS = {"calc": "arithmetic with a calculator tool"}
"""What each model that ships was taught; it can do nothing else."""


def shipped_models() -> dict[str, Path]:
    """The models inside the package by name."""
    return {config.parent.name: config.parent for config in sorted(_HERE.glob("*/config.json"))}


@explained
def resolve_model(name: str | Path) -> str:
    """A shipped model's name, a local directory or a Hugging Face id → what `from_pretrained` takes. Of a run's folder
    that is its last checkpoint.

    Raises ModelError for something that is written like a path but is not a model directory.
    """
    text = str(name)
    shipped = shipped_models()
    if text in shipped:
        return str(shipped[text])
    path = Path(text).expanduser()
    if (words := _never_trainable(text, path)) is not None:
        raise ModelError(words)
    if path.is_dir():
        if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
            return str(path.resolve())
        written = sorted(path.glob("checkpoints/step-*/checkpoint.json"))
        if written and (words := damage_of_checkpoint(written[-1].parent)) is not None:
            raise ModelError(words)
        inner = (written[-1].parent if written else path) / "model"  # of a run, its last checkpoint's
        if (inner / "config.json").is_file() or (inner / "adapter_config.json").is_file():
            return str(inner.resolve())
        raise ModelError(f"The directory {path} holds no model: it has no config.json. {_instead_of(path)}")
    if path.is_file():
        raise ModelError(f"'{text}' is a file, and a model is a folder. Give a folder or a Hugging Face id.")
    if path.is_absolute() or text.startswith((".", "~", "$", "%")) or text.count("/") != 1 or ":" in text:
        raise ModelError(
            f"There is no model at '{text}'. {_otherwise_named(text)}"
            "Give an existing directory, a Hugging Face id such as 'Qwen/Qwen3-0.6B', or a model that ships with the "
            f"package: {', '.join(shipped) or 'none'}."
        )
    return text


def _instead_of(folder: Path) -> str:
    """What to give in place of a folder without a model."""
    if (folder / "run.json").is_file():
        return (
            "It is a run without a checkpoint: it stopped before the first was saved, or its folder 'checkpoints' was "
            "moved or deleted."
        )
    if inside := sorted(folder.glob("step-*/checkpoint.json")):
        return f"Its last checkpoint is {inside[-1].parent}: give that, or the run's folder."
    if runs := sorted(folder.glob("*/run.json"), key=lambda file: file.stat().st_mtime):
        return f"It holds runs, the last of them {runs[-1].parent}: give one of them."
    return "Give a Hugging Face model directory, a training run's folder, or one of its checkpoints."


_OWNERS = {
    **{"qwen": "Qwen", "smollm": "HuggingFaceTB", "llama": "meta-llama", "meta": "meta-llama", "gemma": "google"},
    **{"mistral": "mistralai", "ministral": "mistralai", "phi": "microsoft", "deepseek": "deepseek-ai"},
    **{"olmo": "allenai", "granite": "ibm-granite"},
}
"""Who publishes the models whose names begin so."""


def _otherwise_named(text: str) -> str:
    """The words for a name that another program or a browser has for models."""
    if words := no_path(text):
        return f"{words} "
    if (address := re.match(r"https?://[^/]+/([\w.-]+/[\w.-]+)", text)) is not None:
        return f"That is an address; its Hugging Face id is '{address[1]}'. "
    if text.startswith(("http:", "https:")):
        return "That is an endpoint, which gives nobody its weights: let an agent ask it (agl run --endpoint URL). "
    if run := run_called(text):
        return f"Did you mean {run}? "
    if meant := difflib.get_close_matches(text, shipped_models(), n=1):
        return f"Did you mean '{meant[0]}'? "
    family = re.match(r"[a-z]+", text.lower())
    if family is not None and (owner := _OWNERS.get(family[0])) and re.fullmatch(r"[\w.-]+", text):
        return f"A Hugging Face id has its owner in front: '{owner}/{text}'. "
    if re.fullmatch(r"[\w./-]+:[\w.-]+", text):
        return "That is a name of Ollama's, whose weights (GGUF) cannot be trained. "
    return ""


@contextmanager
def base_of_adapter(folder: Path) -> Iterator[str]:
    """The name of the model that an adapter's folder belongs to. What fails within the block says whose base it was.

    Raises ModelError where the adapter does not say.
    """
    try:
        base = str(read_object(folder / "adapter_config.json")["base_model_name_or_path"])
        is_adapter = (Path(base) / "adapter_config.json").is_file() and not (Path(base) / "config.json").is_file()
    except (OSError, ValueError, KeyError, TypeError):  # of a name longer than names may be, too
        raise ModelError(
            f"{folder}/adapter_config.json does not say base_model_name_or_path, its base model."
        ) from None
    if is_adapter:
        raise ModelError(
            f"{folder} is an adapter of {base}, which is an adapter itself. Merge that one first: agl export"
        )
    try:
        yield base
    except ModelError as error:
        raise ModelError(
            f"{folder} holds an adapter (LoRA) and no whole model. Its base, by adapter_config.json, is '{base}'. "
            f"{error} Download that model, or write its folder as base_model_name_or_path into adapter_config.json."
        ) from error


def _never_trainable(text: str, path: Path) -> str | None:
    """Why a name is of no model whose weights can be trained, and what to do instead; None for others."""
    if _OF_PROVIDERS.match(text) and not path.exists():
        return (
            f"'{text}' is a provider's model: nobody else has its weights, so they cannot be loaded or trained. Tune "
            "its prompts (agl optimize), let an agent ask it (agl run --endpoint URL), or train a model with weights "
            "(agl models)."
        )
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf")) and not (path / "config.json").is_file()):
        return (
            f"'{text}' holds GGUF weights, which are made for sampling and cannot be trained. Give the model that they "
            "were made from: a Hugging Face id or its directory. `agl export --gguf` writes GGUF afterwards."
        )
    return None


def examples_first(model: object) -> str:
    """What to do where a model solves none of the tasks: let it learn good conversations before rewards."""
    only = f"The model {model} knows {KNOWS[model]} only. " if isinstance(model, str) and model in KNOWS else ""
    return (
        f"{only}Let it learn a few dozen good conversations first:  agl train --data chats.jsonl "
        f"--model {model or 'MODEL'} --name sft  and then train from there:  agl train --model runs/sft …  "
        "(docs/first-curve.md shows both.)"
    )
