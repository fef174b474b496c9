"""Fetching a model of the Hugging Face hub before it is loaded, in a process of its own that a Ctrl-C ends.

The model process loads within a deadline and keeps its output to itself, so a download there would run out of time
unseen. What is here already, is a directory or is forbidden to be looked for (HF_HUB_OFFLINE) is left alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from agentlightning.errors import ModelError
from agentlightning.importing import import_environment
from agentlightning.reading import read_object

_TEXTS = (".json", ".jinja", ".model", ".txt", ".tiktoken", ".py")
_EVERY = 10.0
"""Seconds between two lines about how far it has come."""


async def fetch(name: str, say: Callable[[str], object] = sys.stderr.write) -> None:
    """Download the files of a hub id that loading needs, and say how far it is. Raises ModelError that says why not."""
    if await asyncio.to_thread(is_here, name):
        return
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "agentlightning.backend.embedded.download", name),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env={**import_environment(), "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
    )
    assert process.stdout is not None
    line = ""
    try:
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            if not line.startswith("!"):
                say(f"{line}\n")
        code = await process.wait()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    if code:
        why = line.removeprefix("!").strip() if line.startswith("!") else "it was stopped"
        raise ModelError(f"'{name}' was not downloaded: {why}. What has arrived is kept: run it again to go on.")


def is_here(name: str) -> bool:
    """Whether it is a directory, its weights are in the hub's cache, or nothing may or can be fetched."""
    if Path(name).is_dir():
        return True
    try:
        from huggingface_hub import constants, snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ImportError:
        return True
    if constants.HF_HUB_OFFLINE:
        return True
    try:
        return _whole(Path(snapshot_download(name, local_files_only=True)))
    except HFValidationError:  # loading says so
        return True
    except LocalEntryNotFoundError:
        return False


def _whole(folder: Path) -> bool:
    """Whether every file of the weights is there."""
    for index in folder.glob("*.index.json"):
        return all((folder / file).is_file() for file in set(read_object(index)["weight_map"].values()))
    return any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))


def wanted(files: Mapping[str, int]) -> dict[str, int]:
    """Of a repository's files and their sizes, those that loading needs: one form of the weights, and the texts."""
    top = {file: size for file, size in files.items() if "/" not in file}
    weights = {f: s for f, s in top.items() if f.endswith(".safetensors") and not f.startswith("consolidated")}
    weights = weights or {f: s for f, s in top.items() if f.endswith(".bin") and f.startswith("pytorch_model")}
    return {**{f: s for f, s in top.items() if f.endswith(_TEXTS)}, **weights}


def progress(done: int, total: int, seconds: float) -> str:
    """How far it is, as a line."""
    rate = done / max(seconds, 1e-9)
    left = f", about {(total - done) / rate:.0f} s left" if done else ""
    return f"  {done / max(total, 1):.0%} of {_size(total)}, {_size(rate)}/s{left}"


def _size(number: float) -> str:
    return f"{number / 1e9:.1f} GB" if number >= 1e9 else f"{number / 1e6:.1f} MB"


def _arrived(folder: Path) -> int:
    with contextlib.suppress(OSError):
        return sum(file.stat().st_size for file in folder.glob("*"))
    return 0


def main(name: str) -> None:
    """Download it, and print how far it is; the last line of one that failed begins with an exclamation mark."""
    from huggingface_hub import HfApi, constants, snapshot_download

    about = HfApi().model_info(name, files_metadata=True)
    files = wanted({file.rfilename: file.size or 0 for file in about.siblings or ()})
    blobs = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "blobs")
    before, total, begun, done = _arrived(blobs), sum(files.values()), time.monotonic(), threading.Event()
    _print(f"Downloading {name} ({_size(total)}) from {constants.ENDPOINT} to {constants.HF_HUB_CACHE}")

    def watch() -> None:
        while not done.wait(_EVERY):
            _print(progress(min(_arrived(blobs) - before, total), total, time.monotonic() - begun))

    threading.Thread(target=watch, daemon=True).start()
    snapshot_download(name, allow_patterns=list(files))
    done.set()
    _print(f"  done in {time.monotonic() - begun:.0f} s")


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:  # whatever the hub's client makes of a network: a person reads it
        _print(f"! {' '.join(str(error).split())[:300] or type(error).__name__}")
        sys.exit(1)
