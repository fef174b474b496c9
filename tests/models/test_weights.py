"""Whether weights are whole is told from any file, in seconds."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from agentlightning.models.weights import damage_of

MANY = b"{" + b",".join(b'"%d":{"data_offsets":[0,0]}' % i for i in range(800_000)) + b"}"


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 200_000,
        b'{"a":' * 200_000,
        b'{"a":{"data_offsets":[0,"x"]}}',
        b"[]",
        b'{"a":{"data_offsets":[0,1e999]}}',
        MANY,
    ],
    ids=range(6),
)
def test_an_odd_header_is_named(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    began = time.process_time()
    assert "model.safetensors" in (damage_of(tmp_path) or "")
    assert time.process_time() - began < 1


@pytest.mark.parametrize("name", [["x"], {}, 5, None, "\0", "x" * 10_000])
def test_an_odd_name_in_an_index_is_missing(tmp_path: Path, name: object) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"1")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))
    assert "is missing" in (damage_of(tmp_path) or "")
