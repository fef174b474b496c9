"""Algorithms as people write them are set to what they were set to when their record was made."""

from __future__ import annotations

import json

import pytest

from tests.golden.spellings import RECORDS, settings_of

RECORDED = json.loads(RECORDS.read_text())


@pytest.mark.parametrize("spelling", RECORDED)
def test_a_spelling_means_what_it_meant(spelling: str) -> None:
    found, recorded = settings_of(spelling), RECORDED[spelling]
    if isinstance(found, dict) and isinstance(recorded, dict):  # settings that came later are not in the record
        found = {name: value for name, value in found.items() if name in recorded}
    assert found == recorded
