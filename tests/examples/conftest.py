"""The examples are imported as the package `examples`, from the root of the repository; some need bubblewrap."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from agentlightning.errors import ConfigError
from agentlightning.litagent.isolation import check_isolation

sys.path.insert(0, str(Path(__file__).parents[2]))


@pytest.fixture
def sandbox() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed here")
    try:
        check_isolation("bubblewrap")
    except ConfigError as reason:
        pytest.skip(str(reason))
