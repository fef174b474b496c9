"""Curves in a terminal: one mark per curve and column, with the range of values at the left. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.text import Text

from agentlightning.metrics.svg import Points

MARKS = (("•", "cyan"), ("o", "magenta"), ("+", "yellow"), ("x", "green"))


def plot(curves: Mapping[str, Points], width: int, height: int = 10) -> Text:
    """Several curves over steps in so many columns and rows; those that come first lie on top."""
    given = {name: points for name, points in curves.items() if points}
    if not given:
        return Text("No step is finished yet.", style="dim")
    xs = [x for points in given.values() for x, _ in points]
    ys = [y for points in given.values() for _, y in points]
    across, down = (min(xs), max(xs)), (min(ys), max(ys))
    columns = max(10, width - 10)
    grid: list[list[tuple[str, str]]] = [[(" ", "")] * columns for _ in range(height)]
    for points, mark in reversed(list(zip(given.values(), MARKS * 4, strict=False))):
        for x, y in points:
            column = _cell(x, *across, columns)
            row = height - 1 - _cell(y, *down, height)
            grid[row][column] = mark
    return _drawn(grid, *down, *across, list(given))


def _drawn(
    grid: Sequence[Sequence[tuple[str, str]]], low: float, high: float, first: float, last: float, names: Sequence[str]
) -> Text:
    text = Text()
    for number, row in enumerate(grid):
        value = high - (high - low) * number / max(1, len(grid) - 1)
        label = f"{value:8.3g} " if number in (0, len(grid) // 2, len(grid) - 1) else " " * 9
        text.append(f"{label}│", style="dim")
        for character, style in row:
            text.append(character, style=style)
        text.append("\n")
    columns = len(grid[0])
    text.append(f"{'':9}└{'─' * columns}\n", style="dim")
    end = f"step {last:g}"
    text.append(f"{'':10}{f'step {first:g}'.ljust(max(0, columns - len(end)))}{end}\n", style="dim")
    for name, (character, style) in zip(names, MARKS * 4, strict=False):
        text.append(f"{'':10}{character} ", style=style)
        text.append(f"{name}\n")
    text.rstrip()
    return text


def _cell(value: float, low: float, high: float, cells: int) -> int:
    return cells // 2 if high <= low else min(cells - 1, int((value - low) / (high - low) * cells))
