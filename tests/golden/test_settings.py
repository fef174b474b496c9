"""Algorithms as people write them are set to what they were set to when their record was made."""

from __future__ import annotations

import json

import pytest

from tests.golden.spellings import RECORDS, settings_of

RECORDED = json.loads(RECORDS.read_text())


@pytest.mark.parametrize("spelling", RECORDED)
def test_a_spelling_means_what_it_meant(spelling: str) -> None:
    assert settings_of(spelling) == RECORDED[spelling]
