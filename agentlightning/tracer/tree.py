"""Spans as a tree: printed for people, and drawn as an SVG with a bar per span over time."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path

from agentlightning.types import Span
from agentlightning.types.names import CALL_ID, MESSAGE, MESSAGE_BODY, OPERATION, OPERATION_NAME, REPLAYED_FROM
from agentlightning.types.reward import get_rewards

_ROW, _LEFT, _WIDTH = 22, 420, 980
_COLORS = {"model": "#3f6fb5", "tool": "#3c8d5a", "reward": "#c98a1b", "error": "#b8433f", "other": "#8a939c"}


class SpanTree(list[Span]):
    """A list of spans that prints as a tree: `print(tracer.get_last_trace())`."""

    def __str__(self) -> str:
        rows = [f"{'  ' * depth}{_title(span)}{_seconds(span)}" for span, depth in self.walk()]
        return "\n".join(rows) if rows else "(no spans)"

    def walk(self) -> Iterator[tuple[Span, int]]:
        """The spans with their depth, parents before their children, siblings by time."""
        known = {s.span_id for s in self}
        children: dict[str | None, list[Span]] = {}
        for span in sorted(self, key=lambda s: s.start_time or 0.0):
            parent = span.parent_id if span.parent_id in known and span.parent_id != span.span_id else None
            children.setdefault(parent, []).append(span)
        stack = [(span, 0) for span in reversed(children.get(None, []))]
        seen: set[str] = set()
        while stack:
            span, depth = stack.pop()
            if span.span_id in seen:
                continue
            seen.add(span.span_id)
            yield span, depth
            stack += [(child, depth + 1) for child in reversed(children.get(span.span_id, []))]
        for span in self:  # what hangs in a circle
            if span.span_id not in seen:
                yield span, 0

    def to_svg(self) -> str:
        """The tree as an SVG image."""
        rows = list(self.walk())
        starts = [s.start_time for s in self if s.start_time is not None]
        ends = [s.end_time for s in self if s.end_time is not None]
        first, last = min(starts, default=0.0), max([*ends, *starts], default=1.0)
        scale = (_WIDTH - _LEFT - 90) / max(last - first, 1e-6)
        parts = [_row(span, depth, y, first, last, scale) for y, (span, depth) in enumerate(rows)]
        height = _ROW * len(rows) + 10
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
            f'font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>'
        )

    def draw(self, path: str | Path) -> Path:
        """Write `to_svg` to a file, and return its path."""
        path = Path(path)
        path.write_text(self.to_svg(), encoding="utf-8")
        return path

    def _repr_svg_(self) -> str:
        """What a notebook shows."""
        return self.to_svg()


def _row(span: Span, depth: int, number: int, first: float, last: float, scale: float) -> str:
    start = span.start_time if span.start_time is not None else first
    end = span.end_time if span.end_time is not None else last
    x, y = _LEFT + (start - first) * scale, number * _ROW + 5
    width = max((end - start) * scale, 2.0)
    title, short = escape(_title(span)), escape(_title(span)[: 64 - 2 * depth])
    return (
        f'<g><title>{title}</title><text x="{8 + 14 * depth}" y="{y + 14}">{short}</text>'
        f'<rect x="{x:.1f}" y="{y + 3}" width="{width:.1f}" height="{_ROW - 8}" rx="2" fill="{_COLORS[_kind(span)]}"/>'
        f'<text x="{x + width + 5:.1f}" y="{y + 14}" fill="#555">{_seconds(span).strip()}</text></g>'
    )


def _kind(span: Span) -> str:
    a = span.attributes
    if span.status.status_code == "ERROR":
        return "error"
    if get_rewards(span):
        return "reward"
    if CALL_ID in a or a.get("gen_ai.operation.name") == "chat" or a.get("openinference.span.kind") == "LLM":
        return "model"
    kinds = (a.get("gen_ai.operation.name"), a.get("agentops.span.kind"), a.get("openinference.span.kind"))
    return "tool" if kinds[0] == "execute_tool" or kinds[1] == "tool" or kinds[2] == "TOOL" else "other"


def _title(span: Span) -> str:
    """The span's name with the one thing one wants to know of it."""
    a = span.attributes
    if rewards := get_rewards(span):
        return "reward " + ", ".join(f"{k}={v:g}" if k != "primary" else f"{v:g}" for k, v in rewards.items())
    if span.name == MESSAGE:
        return f"message {str(a.get(MESSAGE_BODY, ''))[:60]!r}"
    name = str(a.get(OPERATION_NAME, span.name)) if span.name == OPERATION else span.name
    if REPLAYED_FROM in a:
        name += " (from the record)"
    if (used := a.get("gen_ai.usage.output_tokens")) is not None:
        name += f" ({a.get('gen_ai.usage.input_tokens', '?')} + {used} tokens)"
    if span.status.status_code == "ERROR":
        name += f" ERROR {span.status.description or ''}".rstrip()
    return name


def _seconds(span: Span) -> str:
    if span.start_time is None or span.end_time is None:
        return "  (not ended)"
    seconds = span.end_time - span.start_time
    return f"  {seconds:.2f} s" if seconds >= 1 else f"  {seconds * 1e3:.0f} ms" if seconds >= 5e-4 else ""
