"""Ways of learning on a GPU: a deterministic run can be repeated and gone on with to the last bit; its first step
is that of a CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.golden.test_steps import RECORDED, first_step
from tests.golden.ways import measured

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]
WAYS = ("GRPO", "PPO", "GSPO", "DPO", "SFT", "adapter", "KL in the loss", "replay", "measures", "credit per_turn")
OF_TOKENS = ("response_tokens", "tree_tokens", "prompt_tokens", "reward", "val_reward", "calls", "rollouts")
"""Columns of a step that follow from which tokens were sampled."""


@pytest.mark.parametrize("name", WAYS)
def test_a_run_can_be_repeated_to_the_last_bit(name: str, tmp_path: Path) -> None:
    folders = [tmp_path / "one", tmp_path / "other"]
    for folder in folders:
        folder.mkdir()
    one, other = (json.loads(json.dumps(measured(name, folder))) for folder in folders)
    assert one == other
    now, recorded = first_step(one), first_step(RECORDED["ways"][name])
    assert now.keys() == recorded.keys()
    same = {column: now[column] for column in OF_TOKENS if column in now}
    assert same == {column: recorded[column] for column in same}
    if "loss" in recorded:
        assert now["loss"] == pytest.approx(recorded["loss"], rel=1e-2, abs=1e-4)


def test_a_run_goes_on_to_the_last_bit(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    for folder in (whole, halves):
        folder.mkdir()
    measured("GRPO", halves, steps=1)
    assert measured("GRPO", halves, resume="run")["weights"] == measured("GRPO", whole)["weights"]
