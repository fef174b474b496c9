"""What runs inside vLLM: taking new weights from a directory, checking that they are what was sent, and asking whoever
connects for a key. Imported by vLLM, in its environment, by name.

vLLM reloads a checkpoint in place. On a CPU it keeps a second, packed copy of the output layer; where that layer is
tied to the embeddings the checkpoint has no tensor of its own for it, so the copy would stay as it was. The weights of
experts it packs when it starts and not when it reloads, so its kernel would read the new ones as if they were packed.
"""

from __future__ import annotations

import hmac
import json
import mmap
import os
import shutil
import tempfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

UNREADABLE = (ValueError, TypeError, AttributeError, LookupError, OverflowError)
"""What a damaged header of a file of tensors is found by, depending on where the damage is."""


def sums_of(folder: str) -> dict[str, int]:
    """CRC-32 of every tensor in a directory's *.safetensors, with its type and shape, and of every other file, by name.

    Whoever writes the weights and whoever reads them compute it each for themselves.
    """
    found: dict[str, int] = {}
    with ThreadPoolExecutor(4) as threads:
        for path in sorted(p for p in Path(folder).iterdir() if p.is_file()):
            parts = _tensors(path) if path.suffix == ".safetensors" else [(path.name, b"", path.read_bytes())]
            names, kinds, contents = zip(*parts, strict=True)
            sums = threads.map(lambda kind, content: zlib.crc32(content, zlib.crc32(kind)), kinds, contents)
            found |= zip(names, sums, strict=True)
    return found


def _tensors(path: Path) -> Iterator[tuple[str, bytes, bytes | memoryview]]:
    """Name, type with shape, and content; first the header itself, so that a file of no tensors has something."""
    with path.open("rb") as file:
        data = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    begin = 8 + int.from_bytes(data[:8], "little")
    yield path.name, b"", data[:begin]
    for name, tensor in json.loads(bytes(data[8:begin])).items():
        if name != "__metadata__":
            first, last = tensor["data_offsets"]
            yield name, f"{tensor['dtype']}{tensor['shape']}".encode(), data[begin + first : begin + last]


class KeyCheck:
    """Before vLLM's HTTP server (`--middleware`): nothing is answered without the key. vLLM by itself asks for it where
    text is made only, and not where weights are changed."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._wanted = f"Bearer {os.environ['VLLM_API_KEY']}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        shown = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(shown, self._wanted):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b"{}"})
        else:
            await send({"type": "websocket.close"})


class Publication:
    """Mixed into vLLM's worker class (`--worker-extension-cls`)."""

    rank: int
    model_runner: Any
    reload_weights: Any
    _agl_received: dict[str, str] | None = None
    """Directories with weights that came by broadcast, by name."""

    def agl_damaged(self, path: str, sums: str) -> list[str]:
        """What in a directory is not as it was written, by `sums_of` as JSON. One worker of a server looks."""
        if self.rank:
            return []
        wanted: dict[str, int] = json.loads(sums)
        try:
            found = sums_of(path)
        except (OSError, *UNREADABLE) as error:
            return [f"{path} ({error!r})"]
        return sorted(name for name in {*wanted, *found} if found.get(name) != wanted.get(name))

    def agl_receive(self, name: str, terms: str, rank: int, root: str) -> str:
        """Take part in a broadcast as this rank, and keep what comes under this name, in the directory `root`, or in
        one of that name in this machine's memory. One worker of a server receives, all of them read. What a server
        before this one left there is removed."""
        from .transfer import Terms, receive

        if name in ("", "..") or Path(name).name != name:
            raise ValueError(f"{name!r} is no name of a directory")
        if self.rank:
            return ""
        memory = "/dev/shm" if Path("/dev/shm").is_dir() else tempfile.gettempdir()
        folder = Path(memory) / root
        if self._agl_received is None:
            shutil.rmtree(folder, ignore_errors=True)
            self._agl_received = {}
        receive(Terms.parse(terms), rank, folder / name)
        self._agl_received[name] = str(folder / name)
        return self._agl_received[name]

    def agl_received(self, name: str) -> str:
        """The directory; empty where it did not get here."""
        return (self._agl_received or {}).get(name, "")

    def agl_drop(self, name: str) -> None:
        """Remove what was received under a name."""
        if path := (self._agl_received or {}).pop(name, None):
            shutil.rmtree(path, ignore_errors=True)
            with suppress(OSError):  # there are others
                Path(path).parent.rmdir()

    def agl_load_weights(self, path: str) -> str:
        """Compute with the weights in a Hugging Face directory from now on; returns `path`.

        A directory without weights is refused before anything is touched: vLLM would be left with none.
        """
        if not any(Path(path).glob("*.safetensors")):
            raise FileNotFoundError(f"there are no *.safetensors in {path}")
        self.reload_weights(weights_path=path)
        self._repack_output_layer()
        self._repack_experts()
        return path

    def _repack_output_layer(self) -> None:
        from vllm.model_executor.layers.utils import (  # pyright: ignore[reportMissingImports]
            dispatch_cpu_unquantized_gemm,
        )
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and current_platform.is_cpu():
            dispatch_cpu_unquantized_gemm(getattr(head, "base_layer", head), remove_weight=False)

    def _repack_experts(self) -> None:
        from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

        for layer in self.model_runner.get_model().modules() if current_platform.is_cpu() else ():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None and hasattr(layer, "w13_weight"):
                kernel.fused_experts.process_weights_after_loading(layer)
