"""Whether the weights in a folder are whole, told from names, sizes and headers of files. Loads nothing.

A disk that was full, a copy that was cut off, a file that git-lfs did not fetch: each leaves a folder that looks like a
model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

from agentlightning.reading import read_object

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth")
_READ_WHOLE = frozenset({".json", ".jinja", ".txt", ".model", ".tiktoken"})
_LARGEST_TEXT = 2**28
_LEAST_PER_RANK = 64
"""Bytes of an adapter's weights."""
_LARGEST_HEADER = 16 * 2**20
"""Bytes, of 100,000 tensors in one file. The safetensors library reads more, in minutes."""


def damage_of(folder: Path) -> str | None:
    """What is missing or broken of the weights in a model's folder; None where nothing is seen."""
    if not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
        return None
    if (odd := next(_odd_files(folder), None)) is not None:
        return odd
    files = [file for pattern in _WEIGHTS for file in folder.glob(pattern)]
    if not files:
        return "it has no weights (no *.safetensors)"
    listed: set[str] = set()
    for index in folder.glob("*.index.json"):
        try:
            listed |= {str(name) for name in read_object(index)["weight_map"].values()}
        except (OSError, ValueError, KeyError, AttributeError):
            return f"{index.name} cannot be read"
    missing = sorted(name for name in listed if not os.path.isfile(folder / name))
    if missing:
        return f"{missing[0]} is missing"
    if (words := _rank_without_weights(folder, files)) is not None:
        return words
    return next((words for file in sorted(files) if (words := _damage_of_file(file)) is not None), None)


def _rank_without_weights(folder: Path, files: list[Path]) -> str | None:
    """What is said of an adapter's rank for which its weights have no place: peft makes place before it reads them."""
    if not (folder / "adapter_config.json").is_file():
        return None
    try:
        config = read_object(folder / "adapter_config.json")
        ranks = [config.get("r") or 0, *(config.get("rank_pattern") or {}).values()]
    except (OSError, ValueError, AttributeError):
        return "adapter_config.json cannot be read"
    most = sum(file.stat().st_size for file in files) // _LEAST_PER_RANK
    odd = [rank for rank in ranks if type(rank) is not int or rank > most]
    return f"adapter_config.json has the rank {str(odd[0])[:20]}, and the weights have no place for it" if odd else None


def _odd_files(folder: Path) -> Iterator[str]:
    """What is said of files that the libraries would read without end, or wait for: they look at no size or kind."""
    for file in sorted(folder.iterdir()):
        if file.suffix in _READ_WHOLE or any(file.match(pattern) for pattern in _WEIGHTS):
            if file.exists() and not file.is_file():
                yield f"{file.name} is no regular file"
            elif file.suffix in _READ_WHOLE and file.is_file() and file.stat().st_size > _LARGEST_TEXT:
                yield f"{file.name} has {file.stat().st_size:,} bytes, and more than {_LARGEST_TEXT:,} are not read"


def _damage_of_file(file: Path) -> str | None:
    size = file.stat().st_size
    if size == 0:
        return f"{file.name} is empty"
    with file.open("rb") as opened:
        begin = opened.read(64)
        if begin.startswith(b"version https://git-lfs"):
            return f"{file.name} is a git-lfs pointer, not the file itself: run  git lfs pull"
        if file.suffix != ".safetensors":
            return None
        length = int.from_bytes(begin[:8], "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER):
            return f"{file.name} is cut off or is no safetensors file ({size:,} bytes)"
        opened.seek(8)
        try:
            header = json.loads(opened.read(length))
            end = max((int(t["data_offsets"][1]) for name, t in header.items() if name != "__metadata__"), default=0)
        except (ValueError, LookupError, TypeError, OverflowError, AttributeError, RecursionError):
            return f"the header of {file.name} cannot be read"
    whole = 8 + length + end
    return None if size >= whole else f"{file.name} is cut off ({size:,} of {whole:,} bytes)"


def damage_of_checkpoint(checkpoint: Path, *, resuming: bool = False) -> str | None:
    """What is broken of a run's checkpoint, and the newest older one that is whole; None for a whole checkpoint.

    To go on from it takes the optimiser's state as well.
    """
    words = _damage(checkpoint, resuming)
    if words is None:
        return None
    return f"The checkpoint {checkpoint} is not whole: {words}. {older_than(checkpoint, resuming=resuming)}"


def older_than(checkpoint: Path, *, resuming: bool) -> str:
    """A sentence that names the newest older checkpoint that is whole."""
    older = [
        written.parent
        for written in sorted(checkpoint.parent.glob("step-*/checkpoint.json"))
        if written.parent.name < checkpoint.name and _damage(written.parent, resuming) is None
    ]
    return f"An older one is whole: {older[-1]}." if older else "No older one is whole: begin a new run."


def _damage(checkpoint: Path, resuming: bool) -> str | None:
    model, optimizer = checkpoint / "model", checkpoint / "optimizer"
    folders = [model, *(inner for inner in model.glob("*") if inner.is_dir())]
    found = next((words for folder in folders if (words := damage_of(folder)) is not None), None)
    if found is None and resuming and optimizer.is_dir() and not any(optimizer.rglob("*.*")):
        return "the state of its optimizer is missing"
    return found
