"""Every field and kind that the providers' clients can send, by their own types, stands in our tables: in the
environment `newest`, so that a new one shows here first.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from agentlightning.gateway.dialects import DIALECTS

pytestmark = pytest.mark.clients
SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "fields.py"))


@pytest.mark.parametrize("name", [dialect.name for dialect in DIALECTS if dialect.client_params is not None])
def test_every_field_and_kind_is_in_a_table(name: str) -> None:
    (dialect,) = [dialect for dialect in DIALECTS if dialect.name == name]
    pytest.importorskip(str(dialect.client_params).partition(".")[0])
    assert SCRIPT["unlisted"](dialect) == []
