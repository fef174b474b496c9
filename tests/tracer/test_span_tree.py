"""A trace prints as a tree, and can be drawn."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import agentlightning as agl
from agentlightning.tracer import DummyTracer, SpanTree
from agentlightning.types import Span


async def test_the_last_trace_prints_as_a_tree_and_is_drawn(tmp_path: Path) -> None:
    tracer = DummyTracer()
    async with tracer.trace_context():
        with agl.operation("plan"), agl.operation("search"):
            agl.emit_message("looking for <it>")
        agl.emit_reward(0.5)
    lines = str(tracer.get_last_trace()).splitlines()
    assert [line.rstrip("ms 0123456789") or line for line in lines[:2]] == ["plan", "  search"]
    assert lines[2] == "    message 'looking for <it>'"
    assert lines[3].startswith("reward 0.5")
    drawn = tracer.get_last_trace().draw(tmp_path / "trace.svg")
    root = ElementTree.parse(drawn).getroot()
    assert len(root.findall("{http://www.w3.org/2000/svg}g")) == 4


def test_strange_trees_are_shown_whole() -> None:
    def span(span_id: str, parent: str | None) -> Span:
        return Span.from_attributes(
            rollout_id="r", attempt_id="a", name=span_id, attributes={}, span_id=span_id, parent_id=parent
        )

    tree = SpanTree([span("a", "gone"), span("b", "b"), span("c", "d"), span("d", "c")])
    assert sorted(s.name for s, _ in tree.walk()) == ["a", "b", "c", "d"]
    assert str(SpanTree()) == "(no spans)"
