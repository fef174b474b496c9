"""The API reference has every public name once, and every setting says what it is."""

from __future__ import annotations

import ast
import inspect
import re
from collections import Counter
from pathlib import Path

import pytest

import agentlightning as agl
from agentlightning.algorithm.features import FeatureSettings
from agentlightning.algorithm.settings import TrainingSettings
from agentlightning.backend import ModelSettings
from agentlightning.gateway.settings import CallSettings
from scripts import pages

DOCS = Path(__file__).parents[2] / "docs"


def test_every_public_name_is_in_the_reference_once() -> None:
    texts = [page.read_text() for page in sorted((DOCS / "reference").glob("*.md"))]
    shown = re.findall(r"^::: (\S+)$", "\n".join(texts), flags=re.MULTILINE)
    assert {name: n for name, n in Counter(shown).items() if n > 1} == {}
    homes = {f"agentlightning.{name}" for name in agl.__all__ if name != "__version__"}
    homes -= {"agentlightning.operation", "agentlightning.metrics"}  # there are modules of these names
    assert (homes | {"agentlightning.emitter.operation.operation"}) - set(shown) == set()


@pytest.mark.parametrize(
    "settings", [TrainingSettings, FeatureSettings, ModelSettings, CallSettings], ids=lambda kind: kind.__name__
)
def test_every_setting_says_what_it_is(settings: type) -> None:
    (made,) = ast.parse(inspect.getsource(settings)).body
    assert isinstance(made, ast.ClassDef)
    silent = []
    for entry, following in zip(made.body, [*made.body[1:], None], strict=True):
        if isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name) and entry.target.id[0] != "_":
            said = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            silent += [] if said else [entry.target.id]
    assert silent == []


def test_the_numbers_of_the_chooser_are_those_of_its_code() -> None:
    for block, printed in pages.run(DOCS / "choosing.md"):
        assert block["said"] == printed
