"""What notebooks show: curves and records as HTML, with everything escaped."""

from __future__ import annotations

from pathlib import Path

from agentlightning.metrics.console import NotebookConsole
from agentlightning.metrics.svg import curve_svg
from agentlightning.tracer.trace import Trace
from agentlightning.trainer import RunResult
from agentlightning.types import Rollout, Span

EVIL = "<script>alert(1)</script>"


def test_a_run_grows_by_a_point_per_step() -> None:
    shown: list[str] = []
    console = NotebookConsole(shown.append)
    console.status(f"step 1 {EVIL}")
    assert "No step is finished yet" in shown[-1]
    for step in (1, 2, 3):
        console.step({"step": step, "reward": step / 10, "val_reward": None})
    console.warn(f"Look: {EVIL}")
    assert shown[-1].count("<circle") == 3
    assert "&lt;script&gt;" in shown[-1]
    assert EVIL not in "".join(shown)
    console.close()
    assert "step 1 " not in shown[-1]


def test_records_show_themselves(tmp_path: Path) -> None:
    result = RunResult(tmp_path, None, False, [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.75}])
    assert "<polyline" in result._repr_html_()
    rollout = Rollout(rollout_id="ro-1", input={"q": EVIL}, metadata={"step": 3})._repr_html_()
    assert "ro-1" in rollout
    assert "&lt;script&gt;" in rollout
    trace = Trace(rollout_id="r", attempt_id="a")
    trace.add(Span.from_attributes(name=EVIL, attributes={"a": EVIL}, rollout_id="r", attempt_id="a"))
    for html in (rollout, trace._repr_html_(), curve_svg({EVIL: [(1, 2), (2, 2)]}, EVIL)):
        assert EVIL not in html
        assert "&lt;script&gt;" in html
