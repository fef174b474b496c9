"""A folder with weights on its way between machines: its files as arrays, and the checksums they must have."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentlightning.errors import ModelError
from agentlightning.files import atomic_directory
from agentlightning.reading import read_object
from agentlightning.types.arrays import np

_ADAPTER = "adapter_config.json"
_BASE = "base_model_name_or_path"


@dataclass(frozen=True, slots=True)
class Packed:
    """By relative path. Ray shares the arrays without copying them."""

    files: Mapping[str, np.ndarray]
    checksums: Mapping[str, str]


def checksums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file in a folder, by relative path."""
    found: dict[str, str] = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        with path.open("rb") as file:
            found[str(path.relative_to(folder))] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def digest_of(sums: Mapping[str, str]) -> str:
    """A short name for content with these checksums."""
    return hashlib.sha256(json.dumps(dict(sorted(sums.items()))).encode()).hexdigest()[:16]


def pack(folder: Path) -> Packed:
    sums = checksums(folder)
    return Packed({name: np.fromfile(folder / name, dtype=np.uint8) for name in sums}, sums)


def unpack(packed: Packed, folder: Path) -> None:
    """Write it, all or nothing. Raises ModelError where something was changed on the way."""
    with atomic_directory(folder) as work:
        _write(packed, work, folder)


def unpack_once(packed: Packed, folder: Path, base: str | None = None) -> None:
    """Write it where others may be writing the very same, or reading it already; an adapter in it stands on `base`.
    Nothing that is there is replaced. Raises ModelError where something was changed on the way."""
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write(packed, work, folder)
        if base is not None:
            set_base(work, base)
        work.rename(folder)
    except OSError:  # a folder takes no other's place: somebody else was first
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _write(packed: Packed, work: Path, folder: Path) -> None:
    for name, content in packed.files.items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        content.tofile(path)
    if (wrong := checksums(work)) != dict(packed.checksums):
        names = sorted(n for n in packed.checksums if wrong.get(n) != packed.checksums[n])
        raise ModelError(f"Weights were damaged on their way to {folder}: {', '.join(names)}. Start the run again.")


def set_base(folder: Path, base: str) -> None:
    """Let the adapters in a folder stand on the model at `base`, which is somewhere else on each machine."""
    for file in folder.rglob(_ADAPTER):
        config = read_object(file)
        file.write_text(json.dumps({**config, _BASE: base}, indent=2))


def base_of(folder: Path) -> str | None:
    """The model that the adapter in a folder stands on; None where it holds none."""
    file = folder / _ADAPTER
    return str(read_object(file)[_BASE]) if file.is_file() else None
