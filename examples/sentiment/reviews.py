"""Sentences of film reviews, each rated by many people: the tasks of this example.

They are the "movie review snippets" of C.J. Hutto and E. Gilbert, "VADER: A Parsimonious Rule-based Model for Sentiment
Analysis of Social Media Text", ICWSM 2014, and come with the source archive of the PyPI package vaderSentiment 3.3.2
(MIT licence). Only short sentences that were rated clearly are taken, as many good ones as bad ones.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from .packages import unpacked

PACKAGE = "vaderSentiment==3.3.2"
SHORTEST, LONGEST = 4, 18
"""In words."""
CLEAR = 1.5
"""How far from 0 the mean rating is at least, of −4 to 4."""


class Review(TypedDict):
    """A task."""

    text: str
    label: str
    """positive or negative"""


def make_tasks(train: int, val: int, test: int, seed: int = 0) -> tuple[list[Review], list[Review], list[Review]]:
    """Tasks to train, to validate and to test on: no sentence is in two of them, and half of each are positive."""
    rng = random.Random(seed)
    by_label = {label: [r for r in _reviews() if r["label"] == label] for label in ("positive", "negative")}
    for reviews in by_label.values():
        rng.shuffle(reviews)
    parts: list[list[Review]] = []
    for count in (train, val, test):
        part = [by_label["positive" if n % 2 else "negative"].pop() for n in range(count)]
        rng.shuffle(part)
        parts.append(part)
    return parts[0], parts[1], parts[2]


def _reviews() -> Iterator[Review]:
    for line in _lines():
        _, rating, text = line.split("\t", 2)
        if text.isascii() and SHORTEST <= len(text.split()) <= LONGEST and abs(float(rating)) >= CLEAR:
            yield {"text": text.strip(), "label": "positive" if float(rating) > 0 else "negative"}


def main() -> None:
    """Writes train.jsonl, val.jsonl and test.jsonl into the folder that is named."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, nargs="?", default=Path("data/sentiment"))
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, tasks in zip(("train", "val", "test"), make_tasks(512, 64, 200), strict=True):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    print(f"512 reviews to train, 64 to validate and 200 to test: {folder}")


def _lines() -> list[str]:
    archive = next(unpacked(PACKAGE, source=True).rglob("hutto_ICWSM_2014.tar.gz"))
    with tarfile.open(archive) as packed:
        name = next(n for n in packed.getnames() if n.endswith("movieReviewSnippets_GroundTruth.txt"))
        file = packed.extractfile(name)
        assert file is not None
        return list(io.TextIOWrapper(file, encoding="latin-1"))


if __name__ == "__main__":
    main()
