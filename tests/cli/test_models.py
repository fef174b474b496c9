"""`agl models`, as it is typed: what ships, what is in the cache, and whether it fits by the numbers of `agl plan`."""

from __future__ import annotations

import json
from pathlib import Path

from agentlightning.models import KNOWS, shipped_models
from agentlightning.models.shape import SIZES, TRIED
from tests.cli.test_plan import plan
from tests.typed import agl

CONFIG = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 512, "model_type": "llama"}


def cached_model(cache: Path, name: str) -> None:
    """A model as the client of the hub leaves it in its cache."""
    folder = cache / f"models--{name.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    (snapshot / "model.safetensors").write_bytes(b"")


def test_what_ships_what_is_cached_and_what_was_tried(tmp_path: Path) -> None:
    cached_model(tmp_path, "somebody/tiny")
    done = agl(tmp_path, "models", "--json", "--gpus", "H100", HF_HUB_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    found = {one["model"]: one for one in json.loads(done.stdout)["models"]}
    assert {name for name, one in found.items() if one["source"] == "ships"} == set(shipped_models())
    assert found["somebody/tiny"]["source"] == "cache"
    assert TRIED.keys() <= found.keys()
    assert all(KNOWS[name] in found[name]["remark"] for name in shipped_models())


def test_memory_and_seconds_are_those_of_the_plan(tmp_path: Path) -> None:
    done = agl(tmp_path, "models", "--json", "--gpus", "H100")
    found = {one["model"]: one for one in json.loads(done.stdout)["models"]}
    planned = json.loads(plan("--model", "0.6B", "--gpus", "H100", "--context", "1024", "--json").stdout)
    assert found["0.6b"]["memory"] == max(sum(m.values()) for m in planned["layout"]["memory"].values())
    assert found["0.6b"]["step_seconds"] == planned["layout"]["seconds"]["step"]
    assert not found["70b"]["fits"]
    assert found["70b"]["settings"] == {}
    assert {*SIZES} - {size for size, _ in TRIED.values()} <= found.keys()


def test_names_are_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    done = agl(tmp_path, "models", COLUMNS="80")
    for name in (*shipped_models(), *TRIED):
        assert name in done.stdout
