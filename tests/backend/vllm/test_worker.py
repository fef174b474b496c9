"""What runs inside vLLM, without vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from agentlightning.backend.vllm.worker.agl_vllm_worker import KeyCheck, Publication, sums_of


def a_worker(rank: int = 0) -> Publication:
    made = Publication()
    made.rank = rank
    return made


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    tensors = {"first": torch.arange(5000.0), "second": torch.arange(6.0, dtype=torch.bfloat16).reshape(2, 3)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_weights_that_arrived_are_not_damaged(weights: Path) -> None:
    sums = sums_of(str(weights))
    assert set(sums) == {"first", "second", "model.safetensors", "config.json"}
    assert a_worker().agl_damaged(str(weights), json.dumps(sums)) == []


@pytest.mark.parametrize("place", range(-12, 0))
def test_a_flipped_bit_names_its_tensor(weights: Path, place: int) -> None:
    sums, file = json.dumps(sums_of(str(weights))), weights / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[place] ^= 0x10
    file.write_bytes(data)
    assert a_worker().agl_damaged(str(weights), sums) == ["second"]
    assert a_worker(1).agl_damaged(str(weights), sums) == [], "the first one of a server looks"


def test_a_flipped_bit_anywhere_in_the_file_is_found(weights: Path) -> None:
    """Also where the file says what is in it, so that it can no longer be read as what it was."""
    sums, file = json.dumps(sums_of(str(weights))), weights / "model.safetensors"
    data = file.read_bytes()
    for place in range(8 + int.from_bytes(data[:8], "little")):
        for bit in (0x01, 0x10, 0x40):
            file.write_bytes(data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :])
            assert a_worker().agl_damaged(str(weights), sums), (place, bit)


def test_what_is_cut_off_missing_or_another_is_damaged(weights: Path, tmp_path: Path) -> None:
    sums, file = json.dumps(sums_of(str(weights))), weights / "model.safetensors"
    (weights / "config.json").write_text("{ }")
    assert a_worker().agl_damaged(str(weights), sums) == ["config.json"]
    (weights / "config.json").unlink()
    assert a_worker().agl_damaged(str(weights), sums) == ["config.json"]
    file.write_bytes(file.read_bytes()[:-3])
    assert "second" in a_worker().agl_damaged(str(weights), sums)
    file.write_bytes(file.read_bytes()[:20])
    assert a_worker().agl_damaged(str(weights), sums)
    assert a_worker().agl_damaged(str(tmp_path / "nowhere"), sums)


@pytest.mark.parametrize(
    ("scope", "answered"),
    [
        ({"type": "lifespan"}, True),
        ({"type": "http", "path": "/pause", "headers": [(b"authorization", b"Bearer right")]}, True),
        ({"type": "http", "path": "/pause", "headers": [(b"authorization", b"Bearer wrong")]}, False),
        ({"type": "http", "path": "/collective_rpc", "headers": []}, False),
        ({"type": "websocket", "path": "/v1/realtime", "headers": []}, False),
    ],
)
async def test_nothing_is_answered_without_the_key(
    monkeypatch: pytest.MonkeyPatch, scope: dict[str, Any], answered: bool
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "right")
    reached, sent = list[str](), list[dict[str, Any]]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reached.append(scope["type"])

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    await KeyCheck(app)(scope, None, send)
    assert bool(reached) is answered
    assert bool(sent) is not answered
    if scope["type"] == "http" and not answered:
        assert sent[0]["status"] == 401


@pytest.mark.parametrize("name", ["", ".", "..", "../x", "/x", "a/b"])
def test_what_is_received_goes_nowhere_else(name: str, weights: Path) -> None:
    """A name that leaves its directory is refused before anything is made or removed."""
    with pytest.raises(ValueError, match="is no name of a directory"):
        a_worker().agl_receive(name, "{}", 1, str(weights))
    assert (weights / "config.json").is_file()
