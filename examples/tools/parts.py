"""The tasks of an application in three parts, as its recipe has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

Part = Callable[[], list[dict[str, Any]]]


def parts_of(make: Callable[[], Mapping[str, list[dict[str, Any]]]]) -> tuple[Part, Part, Part]:
    """What gives the tasks to train on, those to validate on, and those that neither has seen (`train`, `val`, `test`).

    They are made when the first of them are asked for.
    """
    made = cache(make)

    def part(name: str) -> list[dict[str, Any]]:
        return made()[name]

    return partial(part, "train"), partial(part, "val"), partial(part, "test")
