"""Each interval, verdict and promise holds at its rate in simulated runs, and is said where it is so."""

from __future__ import annotations

import pytest

from agentlightning.algorithm.verdicts import TREND_LEVEL, chance_of_no_rise
from scripts import calibration


@pytest.mark.slow
@pytest.mark.parametrize("runs", [120, pytest.param(1000, marks=pytest.mark.slow)])
def test_everything_that_is_said_holds_at_its_rate(runs: int) -> None:
    assert [row for row in calibration.measured(runs, seed=7) if not row.holds] == []


@pytest.mark.slow
def test_each_statement_has_a_row_on_the_page() -> None:
    rows = calibration.measured(12)
    page = calibration.PAGE.read_text().split(calibration.MARKS[0])[1].split(calibration.MARKS[1])[0]
    missing = [f"| {r.said} | {r.where} | {r.promised} |" for r in rows]
    assert [line for line in missing if line not in page] == []
    assert len(rows) == page.count("\n") - 2


@pytest.mark.slow
def test_the_simulation_finds_a_test_that_was_made_for_one_look() -> None:
    """What `agl why` said before: at the level .15, whenever somebody looked."""

    def once(rewards: list[float]) -> bool:
        return chance_of_no_rise(rewards) <= TREND_LEVEL

    rng = calibration.np.random.default_rng(0)
    flat = [calibration.series(rng, "flat", (8, 4), steps=36) for _ in range(40)]
    assert calibration.share(lambda r: calibration.ever(once, r), flat) > 0.3
    assert calibration.share(lambda r: calibration.ever(calibration.has_risen, r), flat) <= 0.1
