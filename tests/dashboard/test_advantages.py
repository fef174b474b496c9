"""Advantages that cannot be computed again from what is recorded are not shown, and the page says why."""

from __future__ import annotations

from typing import Any

import pytest

from agentlightning.algorithm.credit.units import CreditRule
from agentlightning.dashboard.groups import _rule
from agentlightning.types.run import Run


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"credit": "token_gae"}, "a critic or a teacher"),
        ({"credit": "teacher"}, "a critic or a teacher"),
        ({"advantage": "reinforce", "baseline": "task"}, "baseline of earlier steps"),
    ],
)
def test_what_is_not_recorded_is_said(settings: dict[str, Any], reason: str) -> None:
    found = _rule(Run(run_id="r", settings={"advantage": "grpo", **settings}))
    assert isinstance(found, str)
    assert reason in found
    assert isinstance(_rule(Run(run_id="r", settings={"advantage": "grpo"})), CreditRule)
