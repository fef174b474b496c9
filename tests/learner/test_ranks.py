"""A learner over 1, 2 and 4 ranks computes what one learner does: to 1e-5 in float32."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import ConfigError

pytestmark = pytest.mark.timeout(330)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all weights", "adapter", "checkpointed"])
def test_ranks_compute_what_one_learner_does(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    found = numbers_of("tests.learner.ranks", kind, str(tiny_model_dir), str(tmp_path))
    assert set(found) == {0, 1, 2, 4}
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-6)
    assert_alike(found)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all weights", "adapter", "checkpointed", "bfloat16"])
def test_ranks_that_share_rows_compute_what_one_learner_does(kind: str, tiny_model_dir: Path, tmp_path: Path) -> None:
    """Two that share every row, and two pairs of such."""
    found = numbers_of("tests.learner.ranks", kind, str(tiny_model_dir), str(tmp_path), "2")
    assert set(found) == {0, 2, 4}
    assert_alike(found, **({"rel": 0.05, "state": 1e-3} if kind == "bfloat16" else {}))


@pytest.mark.slow
def test_layers_are_cut_as_each_model_wants_them() -> None:
    """Biases, norms of each head, outputs that are gathered, one layer for queries, keys and values, gated delta nets;
    and models that cannot be cut are refused."""
    found = numbers_of("tests.learner.shared_rows")
    refused = {name: found.pop(name) for name in ("apertus", "qwen3_moe", "gpt2")}
    assert refused["apertus"].startswith("ApertusForCausalLM cannot be computed with tensor_parallel=2: log-probs")
    assert "not known here (moe_tp_experts" in refused["qwen3_moe"]
    assert "GPT2LMHeadModel has no plan for it" in refused["gpt2"]
    assert len(found) == 10
    for name, gaps in found.items():
        assert max(gaps) < 2e-5, name


@pytest.mark.parametrize(
    ("gpus", "words"),
    [("aa", "ranks 0 and 1 .* there are 1 for 2 ranks. Set ranks=1"), ("abca", "ranks 0 and 3 .* 3 for 4 .* ranks=3")],
)
def test_ranks_on_one_gpu_are_refused_before_anything_is_loaded(gpus: str, words: str) -> None:
    from agentlightning.backend.embedded.ranks import refuse_shared_gpus

    with pytest.raises(ConfigError, match=words):
        refuse_shared_gpus(gpus)
    refuse_shared_gpus("abcd")


def numbers_of(script: str, *arguments: str) -> dict[Any, Any]:
    """What a script says in lines of JSON."""
    command = [sys.executable, "-m", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return {line["of"]: line["numbers"] for line in map(json.loads, done.stdout.splitlines())}


def assert_alike(found: dict[int, list[float]], rel: float = 1e-5, state: float = 1e-6) -> None:
    """Two and four ranks have the numbers of one learner, and four the state that two wrote."""
    assert found[2] == pytest.approx(found[0], rel=rel, abs=1e-6)
    *numbers, gap_of_states = found[4]
    assert numbers == pytest.approx(found[0], rel=rel, abs=1e-6)
    assert gap_of_states < state
