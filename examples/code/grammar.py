"""What problems are made of: which items of a list are kept, what becomes of each, and what becomes of them all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A part of a problem: in words, and in Python."""

    words: str
    python: str


Choice = Callable[[random.Random], Part]


@dataclass(frozen=True)
class Kind:
    """Problems about lists of one kind of item."""

    item: Callable[[random.Random], Any]
    ends: Sequence[Part]
    keeps: Sequence[Choice]
    changes: Sequence[Choice]


def _part(words: str, python: str, values: Sequence[Any] = ("",)) -> Choice:
    """A part whose {} is one of the values."""

    def choose(rng: random.Random) -> Part:
        value = rng.choice(values)
        return Part(words.format(value), python.format(value))

    return choose


DIGITS = range(2, 10)
NUMBERS = Kind(
    item=lambda rng: rng.randint(-9, 20),
    ends=(
        Part("the sum of", "sum({})"),
        Part("the largest of", "max({})"),
        Part("the smallest of", "min({})"),
        Part("in order,", "sorted({})"),
        Part("a list of", "list({})"),
    ),
    keeps=(
        _part("the numbers", ""),
        _part("the even numbers", "x % 2 == 0"),
        _part("the odd numbers", "x % 2 == 1"),
        _part("the numbers above {}", "x > {}", DIGITS),
        _part("the numbers below {}", "x < {}", DIGITS),
    ),
    changes=(
        _part("", "x"),
        _part(", each squared", "x * x"),
        _part(", each negated", "-x"),
        _part(", each plus {}", "x + {}", DIGITS),
        _part(", each times {}", "x * {}", DIGITS),
    ),
)

ANIMALS = """ox ant bat bee cat cow dog eel elk fox hen owl rat bear crab crow deer duck frog goat hare lion mole newt
toad wolf camel eagle horse otter tiger zebra badger donkey falcon rabbit spider turtle"""
WORDS = Kind(
    item=lambda rng: rng.choice(ANIMALS.split()),
    ends=(
        Part("a list of", "list({})"),
        Part("in order,", "sorted({})"),
        Part("joined,", "''.join({})"),
        Part("the longest of", "max(({}), key=len)"),
        Part("the shortest of", "min(({}), key=len)"),
    ),
    keeps=(
        _part("the words", ""),
        _part("the words longer than {}", "len(x) > {}", range(2, 5)),
        _part("the words shorter than {}", "len(x) < {}", range(4, 7)),
        _part("the words with {}", "'{}' in x", "aeor"),
        _part("the words that begin with {}", "x.startswith('{}')", "bcdef"),
    ),
    changes=(
        _part("", "x"),
        _part(", each in upper case", "x.upper()"),
        _part(", each reversed", "x[::-1]"),
        _part(", each twice", "x * 2"),
        _part(", each without its first letter", "x[1:]"),
        _part(", each without its last letter", "x[:-1]"),
        _part(", each with {} added", "x + '{}'", "xyz"),
    ),
)
KINDS = {"numbers": NUMBERS, "words": WORDS}
