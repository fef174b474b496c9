"""Draws what a prompt optimiser found over its rollouts, for the documentation:

    python scripts/prompt_curves.py docs/assets/prompt-curves.svg APO=runs/apo-0,runs/apo-1 GEPA=runs/gepa-0

A line per run: the mean validation reward of the best candidate so far known. It has its own light ground, so it can be
read on a dark page. Needs no package.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 340, 56, 20, 34, 48
COLOURS = ("#d84315", "#1565c0", "#2e7d32")
TEXT, GRID = "#263238", "#cfd8dc"
Curve = Sequence[tuple[int, float]]


def curve(run_dir: Path) -> Curve:
    """Rollouts and reward, a point per row of the run's table."""
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(row["rollouts"], row["best_val"]) for row in rows if row.get("best_val") is not None]


def drawn(groups: dict[str, list[Curve]]) -> str:
    most = max(x for curves in groups.values() for line in curves for x, _ in line)
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return round(LEFT + wide * x / most, 1), round(TOP + high * (1 - y), 1)

    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="14" fill="#fafafa"/>']
    for tenth in range(0, 11, 2):
        _, y = place(0, tenth / 10)
        parts.append(f'<line x1="{LEFT}" y1="{y}" x2="{WIDTH - RIGHT}" y2="{y}" stroke="{GRID}"/>')
        parts.append(_text(LEFT - 8, y + 4, f"{tenth / 10:g}", "end"))
    step = next(s for s in (20, 50, 100, 200, 500, 1000, 5000) if most / s <= 8)
    for tick in range(0, most + 1, step):
        parts.append(_text(place(tick, 0)[0], HEIGHT - BOTTOM + 18, f"{tick:,}", "middle"))
    parts.append(_text(LEFT + wide / 2, HEIGHT - 10, "rollouts", "middle"))
    for n, (name, curves) in enumerate(groups.items()):
        colour = COLOURS[n % len(COLOURS)]
        parts.append(_text(LEFT + 10 + 150 * n, 22, f"— {name}", "start", colour, bold=True))
        for line in curves:
            points = " ".join("{},{}".format(*place(*point)) for point in line)
            style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-opacity="0.75"'
            parts.append(f'<polyline points="{points}" {style}/>')
            parts += ['<circle cx="{}" cy="{}" r="3" fill="{}"/>'.format(*place(*point), colour) for point in line[-1:]]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
    label = f'aria-label="Validation reward of the best prompt over rollouts: {", ".join(groups)}."'
    fonts = "font-family=\"system-ui, 'DejaVu Sans', sans-serif\""
    return "\n".join([f"{head} {label} {fonts}>", *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, anchor: str, colour: str = TEXT, *, bold: bool = False) -> str:
    weight = ' font-weight="600"' if bold else ""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="13"{weight} fill="{colour}">{text}</text>'


def main() -> None:
    out, *given = sys.argv[1:]
    groups: dict[str, list[Curve]] = {}
    for group in given:
        name, _, folders = group.partition("=")
        groups[name] = [curve(Path(folder)) for folder in folders.split(",")]
    Path(out).write_text(drawn(groups))


if __name__ == "__main__":
    main()
