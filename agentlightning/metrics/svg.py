"""Curves as SVG, for pages that must need nothing else: the report and notebooks. Pure; everything given is escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

Points = Sequence[tuple[float, float]]
"""(step, value), in the order of their steps."""

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 240, 52, 28, 24
COLOURS = ("#2a6f97", "#b23a48", "#52796f", "#b5838d", "#6d597a", "#bc6c25")
"""Told apart also by who does not see red and green apart; on white and on black."""


def curve_svg(curves: Mapping[str, Points], title: str = "") -> str:
    """Lines over steps with axes and a legend. A curve of one point is a dot; without any point there is a word."""
    given = {name: points for name, points in curves.items() if points}
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title or "curve")}" style="max-width:{WIDTH}px;width:100%;font:12px sans-serif">'
    )
    if not given:
        return f'{head}<text x="20" y="40" fill="currentColor">No step is finished yet.</text></svg>'
    xs = [x for points in given.values() for x, _ in points]
    ys = [y for points in given.values() for _, y in points]
    x_range, y_range = _range(xs), _range(ys)
    parts = [head, *_axes(x_range, y_range)]
    for points, colour in zip(given.values(), COLOURS * 3, strict=False):
        placed = [_place(x, y, x_range, y_range) for x, y in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in placed)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if len(placed) <= 12:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in placed]
    return "".join([*parts, *_legend(list(given)), "</svg>"])


_MOST = 1e300
"""Twice as much is still finite."""


def points_of(steps: Sequence[Mapping[str, object]], name: str) -> list[tuple[float, float]]:
    """A metric over the steps that have it; a number that is not finite, or nearly so, has no place in a picture."""
    found = [(m.get("step"), m.get(name)) for m in steps]
    points = [(float(x), float(y)) for x, y in found if isinstance(x, int | float) and isinstance(y, int | float)]
    return [(x, y) for x, y in points if abs(x) < _MOST and abs(y) < _MOST]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - max(0.5, abs(low) / 2), high + max(0.5, abs(low) / 2))


def _place(x: float, y: float, xs: tuple[float, float], ys: tuple[float, float]) -> tuple[float, float]:
    across = LEFT + (x - xs[0]) / (xs[1] - xs[0]) * (WIDTH - LEFT - 12)
    down = TOP + (1 - (y - ys[0]) / (ys[1] - ys[0])) * (HEIGHT - TOP - BOTTOM)
    return across, down


def _axes(xs: tuple[float, float], ys: tuple[float, float]) -> list[str]:
    parts = []
    for n in range(5):
        value = ys[0] + n / 4 * (ys[1] - ys[0])
        _, y = _place(xs[0], value, xs, ys)
        parts.append(
            f'<line x1="{LEFT}" x2="{WIDTH - 12}" y1="{y:.1f}" y2="{y:.1f}" stroke="currentColor" opacity="0.15"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{value:.3g}</text>'
        )
    for x, anchor in ((xs[0], "start"), (xs[1], "end")):
        across, _ = _place(x, ys[0], xs, ys)
        text = f'<text x="{across:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}" fill="currentColor">step {x:g}</text>'
        parts.append(text)
    return parts


def _legend(names: Sequence[str]) -> list[str]:
    parts, x = [], float(LEFT)
    for name, colour in zip(names, COLOURS * 3, strict=False):
        parts.append(f'<rect x="{x:.0f}" y="6" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="15" fill="currentColor">{escape(name)}</text>')
        x += 24 + 7 * len(name)
    return parts
