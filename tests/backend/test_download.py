"""A model of the hub is fetched before it is loaded, and how far it has come is seen: against a hub on loopback."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from agentlightning.backend.embedded.download import fetch, is_here, progress, wanted
from agentlightning.errors import ModelError
from agentlightning.models import shipped_models

NAME = "someone/calc"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {f.name: f.read_bytes() for f in shipped_models()["calc"].iterdir() if f.is_file()}


class Hub(BaseHTTPRequestHandler):
    """As much of the Hugging Face hub as one model needs."""

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if path in (f"/api/models/{NAME}", f"/api/models/{NAME}/revision/main"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in FILES.items()]
            self._answer(json.dumps({"id": NAME, "sha": COMMIT, "siblings": siblings}).encode())
        elif path == f"/api/models/{NAME}/tree/{COMMIT}":
            tree = [{"type": "file", "path": n, "size": len(d), "oid": COMMIT} for n, d in FILES.items()]
            self._answer(json.dumps(tree).encode())
        elif path.startswith(f"/{NAME}/resolve/") and path.split("/")[-1] in FILES:
            self._answer(FILES[path.split("/")[-1]])
        else:
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.end_headers()

    do_HEAD = do_GET

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache of the hub's client, here and in processes that are started."""
    with hub() as address:
        for name, value in (("HF_ENDPOINT", address), ("HF_HUB_CACHE", str(tmp_path)), ("HF_HUB_OFFLINE", "0")):
            monkeypatch.setenv(name, value)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))  # read at its import
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        yield tmp_path


async def test_it_is_fetched_once_and_said(cache: Path) -> None:
    said: list[str] = []
    await fetch(NAME, said.append)
    assert said[0].startswith(f"Downloading {NAME} (2.8 MB) from http://127.0.0.1")
    assert str(cache) in said[0]
    assert "done in" in said[-1]
    said.clear()
    await fetch(NAME, said.append)
    assert said == []
    assert weights(cache) == [FILES["model.safetensors"]]


def weights(cache: Path) -> list[bytes]:
    """Those that have arrived."""
    return [file.read_bytes() for file in cache.glob("models--*/snapshots/*/model.safetensors")]


async def test_a_download_that_cannot_be_says_why(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"'someone/else' was not downloaded: .*404"):
        await fetch("someone/else", lambda _: None)


async def test_a_directory_is_left_alone(tmp_path: Path) -> None:
    await fetch(str(tmp_path), lambda text: pytest.fail(text))


def test_shards_must_all_be_there(cache: Path) -> None:
    snapshot = cache / "models--someone--calc" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    refs = cache / "models--someone--calc" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    (snapshot / "model.safetensors.index.json").write_text(
        '{"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}'
    )
    (snapshot / "1.safetensors").write_bytes(b"")
    assert not is_here(NAME)
    (snapshot / "2.safetensors").write_bytes(b"")
    assert is_here(NAME)


def test_one_form_of_the_weights_is_enough() -> None:
    both = {"model.safetensors": 5, "pytorch_model.bin": 5, "config.json": 1, "onnx/model.onnx": 9, "flax.msgpack": 9}
    assert wanted(both) == {"config.json": 1, "model.safetensors": 5}
    assert wanted({"pytorch_model.bin": 5, "training_args.bin": 1}) == {"pytorch_model.bin": 5}


def test_how_far_it_is() -> None:
    assert progress(500_000_000, 2_000_000_000, 10.0) == "  25% of 2.0 GB, 50.0 MB/s, about 30 s left"
    assert progress(0, 2_000_000_000, 10.0) == "  0% of 2.0 GB, 0.0 MB/s"
