"""Weights that did not arrive stop the run at its first step, however they went astray; those that did are exact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentlightning.errors import EngineError
from agentlightning.metrics import read_metrics

from ..test_backend import fit
from .on_fake import IgnoresAdapters, KeepsContexts, KeepsOldHead, KeepsOldWeights, LabelsOld, VLLMOnFake

pytestmark = pytest.mark.slow

STEP = {"steps": 2, "tasks_per_step": 2, "group_size": 4, "learning_rate": 1e-2, "max_context": 128, "max_kl": None}


@pytest.mark.parametrize("lora_rank", [None, 4])
def test_every_step_samples_from_what_was_learned(tmp_path: Path, lora_rank: int | None) -> None:
    rows = fit(tmp_path, VLLMOnFake, lora_rank=lora_rank, **STEP)
    assert len(rows) == 2
    assert all(m["sync_gap"] < 1e-4 for m in rows if m["updates"])
    assert any(m["updates"] for m in rows)
    assert all(m["logprob_gap_max"] < 1e-4 for m in rows if m["updates"])


@pytest.mark.parametrize(
    ("server", "settings", "cause"),
    [
        (KeepsOldWeights, {}, "off the learner's"),
        (KeepsOldHead, {}, "off the learner's"),
        (KeepsContexts, {}, "off the learner's"),
        (LabelsOld, {}, "still samples from version 0"),
        (IgnoresAdapters, {"lora_rank": 4}, "off the learner's"),
    ],
)
def test_weights_that_go_astray_stop_the_run_at_its_first_step(
    tmp_path: Path, server: Any, settings: dict[str, Any], cause: str
) -> None:
    class Sabotaged(VLLMOnFake):
        fake = server

    with pytest.raises(EngineError, match=cause):
        fit(tmp_path, Sabotaged, **STEP, **settings)
    assert [m["step"] for m in read_metrics(tmp_path / "run" / "metrics.jsonl")] == []
