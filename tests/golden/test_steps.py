"""Every way of learning does to the last bit what it did when its record was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.golden.ways import ALGORITHMS, RECORDS, machine, measured

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
RECORDED = json.loads(RECORDS.read_text())


def test_every_way_has_a_record() -> None:
    assert set(RECORDED["ways"]) == set(ALGORITHMS)


@pytest.mark.skipif(RECORDED["machine"] != machine(), reason=f"recorded with {RECORDED['machine']}, not {machine()}")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_its_steps_are_those_that_were_recorded(name: str, tmp_path: Path) -> None:
    found = json.loads(json.dumps(measured(name, tmp_path)))
    assert found == RECORDED["ways"][name]
