"""Arithmetic questions with exact whole-number answers, from a seed.

Half are expressions with precedence and parentheses, half short stories; half need one operation, half need two.
Not a benchmark: every question comes from a template below.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Tree = int | tuple["Tree", str, "Tree"]
"""A number, or (left, operator, right)."""

LARGEST = 9999
NAMES = ("Ana", "Ben", "Chloe", "Dan", "Eva", "Finn", "Gita", "Hugo")
THINGS = ("apples", "books", "cards", "eggs", "lamps", "pens", "shells", "stamps")
ASKS = ("What is {}?", "Compute {}.", "How much is {}?")


@dataclass(frozen=True)
class Problem:
    """A question and the calculation behind it."""

    question: str
    tree: Tree

    @property
    def answer(self) -> int:
        return int(evaluate(self.tree))

    def as_task(self) -> dict[str, Any]:
        return {"question": self.question, "answer": self.answer}


def evaluate(tree: Tree) -> Fraction:
    """The exact value of a tree. Raises ZeroDivisionError."""
    if isinstance(tree, int):
        return Fraction(tree)
    left, op, right = evaluate(tree[0]), tree[1], evaluate(tree[2])
    if op == "+":
        return left + right
    if op == "-":
        return left - right
    return left * right if op == "*" else left / right


def make_tasks(train: int, val: int, seed: int = 0) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and validation tasks that share no question."""
    rng = random.Random(f"calc tasks {seed}")
    problems: dict[str, Problem] = {}
    while len(problems) < train + val:
        problem = make_problem(rng)
        problems.setdefault(problem.question, problem)
    tasks = [problem.as_task() for problem in problems.values()]
    return tasks[:train], tasks[train:]


def make_problem(rng: random.Random) -> Problem:
    """One question whose every result on the way is a whole number from 0 to LARGEST."""
    make = rng.choice((_expression, _story))
    operations = rng.choice((1, 2))
    while True:
        problem = make(rng, operations)
        if _is_whole(problem.tree):
            return problem


def _is_whole(tree: Tree) -> bool:
    if isinstance(tree, int):
        return True
    if not (_is_whole(tree[0]) and _is_whole(tree[2])) or (tree[1] == "/" and evaluate(tree[2]) == 0):
        return False
    value = evaluate(tree)
    return value.denominator == 1 and 0 <= value <= LARGEST


# Expressions


def _expression(rng: random.Random, operations: int) -> Problem:
    tree = _binary(rng, rng.randint(2, 99), rng.randint(2, 99))
    if operations == 2:
        extra = rng.randint(2, 99)
        tree = _binary(rng, tree, extra) if rng.random() < 0.5 else _binary(rng, extra, tree)
    return Problem(rng.choice(ASKS).format(write(tree)), tree)


def _binary(rng: random.Random, left: Tree, right: Tree) -> Tree:
    """`left` and `right` under an operator. A division is by a small number and, if it can be, without remainder."""
    op = rng.choice("+-*/" if isinstance(right, int) else "+-*")
    if op == "/":
        divisors = [n for n in range(2, 13) if evaluate(left) % n == 0]
        right = rng.choice(divisors) if divisors else right
    return (left, op, right)


def write(tree: Tree) -> str:
    """The tree as text, with the parentheses it needs and no others."""
    if isinstance(tree, int):
        return str(tree)
    left, op, right = tree
    return f"{_operand(left, op, right=False)} {op} {_operand(right, op, right=True)}"


def _operand(tree: Tree, parent: str, *, right: bool) -> str:
    text = write(tree)
    if isinstance(tree, int):
        return text
    binds_tighter = tree[1] in "*/" and parent in "+-"
    same_level = (tree[1] in "*/") == (parent in "*/")
    return text if binds_tighter or (same_level and not right) else f"({text})"


# Stories


@dataclass(frozen=True)
class _Story:
    """Text with the numbers a, b, c in it, how to draw them, and what to calculate."""

    text: str
    draw: Callable[[random.Random], tuple[int, ...]]
    tree: Callable[..., Tree]


def _numbers(*highest: int) -> Callable[[random.Random], tuple[int, ...]]:
    """Draws one number from 2 up to each of `highest`."""
    return lambda rng: tuple(rng.randint(2, high) for high in highest)


def _shared(*highest: int) -> Callable[[random.Random], tuple[int, ...]]:
    """Like `_numbers`, with the first number a multiple of the second."""

    def draw(rng: random.Random) -> tuple[int, ...]:
        first, second, *rest = _numbers(*highest)(rng)
        return (first * second, second, *rest)

    return draw


STORIES = {
    1: (
        _Story("{name} has {a} {things} and buys {b} more. How many now?", _numbers(99, 99), lambda a, b: (a, "+", b)),
        _Story("{name} had {a} {things} and lost {b}. How many are left?", _numbers(99, 99), lambda a, b: (a, "-", b)),
        _Story("A box holds {a} {things}. How many are in {b} boxes?", _numbers(99, 99), lambda a, b: (a, "*", b)),
        _Story("{b} friends share {a} {things}. How many does each get?", _shared(40, 12), lambda a, b: (a, "/", b)),
    ),
    2: (
        _Story(
            "A box holds {a} {things}. {name} has {b} boxes and {c} more. How many in all?",
            _numbers(40, 40, 99),
            lambda a, b, c: ((a, "*", b), "+", c),
        ),
        _Story(
            "{name} buys {a} {things} for {b} dollars each and pays {c} dollars. How much is left?",
            _numbers(20, 20, 400),
            lambda a, b, c: (c, "-", (a, "*", b)),
        ),
        _Story(
            "{a} boys and {b} girls get {c} {things} each. How many in all?",
            _numbers(60, 60, 30),
            lambda a, b, c: ((a, "+", b), "*", c),
        ),
        _Story(
            "{name} had {a} {things}, lost {b} and buys {c} more. How many now?",
            _numbers(99, 99, 99),
            lambda a, b, c: ((a, "-", b), "+", c),
        ),
        _Story(
            "{name} sells {a} {things} in boxes of {b}, for {c} dollars a box. How much is that?",
            _shared(40, 12, 30),
            lambda a, b, c: ((a, "/", b), "*", c),
        ),
        _Story(
            "{b} friends share {a} {things}. {name} gets one share and had {c}. How many now?",
            _shared(40, 12, 99),
            lambda a, b, c: ((a, "/", b), "+", c),
        ),
    ),
}


def _story(rng: random.Random, operations: int) -> Problem:
    story = rng.choice(STORIES[operations])
    numbers = story.draw(rng)
    slots = dict(zip("abc", numbers, strict=False))
    question = story.text.format(name=rng.choice(NAMES), things=rng.choice(THINGS), **slots)
    return Problem(question, story.tree(*numbers))
