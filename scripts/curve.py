"""Draws the curve of a run as SVG, for the docs.

python scripts/curve.py runs/sql-20261122-150000 docs/assets/sql-curve.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from agentlightning.metrics import read_metrics
from agentlightning.metrics.svg import curve_svg, points_of

CURVES = {"reward": "reward in training", "val_reward": "reward on held-out tasks"}


def draw(run: Path, out: Path, also: Sequence[str] = ()) -> None:
    rows = read_metrics(run / "metrics.jsonl")
    drawn = curve_svg({label: points_of(rows, name) for name, label in {**CURVES, **{n: n for n in also}}.items()})
    head, mark, rest = drawn.partition(">")
    out.write_text(f'{head}{mark}<rect width="100%" height="100%" fill="white"/>{rest}\n')  # pages may be dark


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder")
    parser.add_argument("out", type=Path)
    parser.add_argument("--also", action="append", default=[], metavar="METRIC", help="another metric to draw")
    given = parser.parse_args()
    draw(given.run, given.out, given.also)


if __name__ == "__main__":
    main()
