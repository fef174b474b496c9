"""When the soak says that memory grows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "soak.py"


@pytest.fixture(scope="module")
def soak() -> ModuleType:
    spec = importlib.util.spec_from_file_location("soak_script", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["soak_script"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_memory_that_fills_its_caches_and_stays_is_flat(soak: ModuleType) -> None:
    filling = [(at, 100.0 + min(at, 250.0)) for at in range(600)]
    assert soak.verdict(filling, 600.0) is None
    assert soak.growth(filling, 600.0) == 0.0


def test_memory_that_grows_on_and_on_is_told_in_words(soak: ModuleType) -> None:
    growing = [(at, 100.0 + at) for at in range(600)]
    said = soak.verdict(growing, 600.0)
    assert said is not None
    assert "grew by 149 MiB" in said
    assert "48" in said


def test_a_peak_is_no_growth(soak: ModuleType) -> None:
    assert soak.verdict([(at, 900.0 if at % 50 == 0 else 100.0) for at in range(600)], 600.0) is None


def test_what_comes_after_the_load_does_not_count(soak: ModuleType) -> None:
    assert soak.verdict([(at, 100.0 if at < 600 else 900.0) for at in range(700)], 600.0) is None


def test_the_record_is_a_size_a_minute(soak: ModuleType) -> None:
    assert soak.every_minute([(at, float(at)) for at in range(130)]) == [59, 119, 129]
