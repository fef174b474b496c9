"""`calculate_output` of a `multi` grader: arithmetic over the rewards of its graders, parsed and never run as code.

    expression = term (("+" | "-") term)*            term  = signed (("*" | "/") signed)*
    signed     = ("+" | "-") signed | power          power = atom ("^" signed)?
    atom       = number | name | function "(" expression ("," expression)* ")" | "(" expression ")"

A sign binds less than `^`, which groups from the right: -2^2 is -4, 2^3^2 is 512.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from agentlightning.errors import GraderRefused

_TOKEN = re.compile(r"\s*(?:((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|([^\W\d]\w*)|([-+*/^(),]))")
_DEEPEST = 50
_LONGEST = 10_000

FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
    "min": (lambda *values: min(values), 1, 100),
    "max": (lambda *values: max(values), 1, 100),
    "abs": (abs, 1, 1),
    "floor": (math.floor, 1, 1),
    "ceil": (math.ceil, 1, 1),
    "exp": (math.exp, 1, 1),
    "sqrt": (math.sqrt, 1, 1),
    "log": (math.log, 1, 1),
}
"""The functions, each with the smallest and the largest number of arguments; `log` is the natural one."""
_BINARY: Mapping[str, Callable[[float, float], float]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "^": math.pow,
}

Step = float | str | tuple[Callable[..., Any], int]
"""A number, a name, or a function with the number of its arguments, which come before it."""


class FormulaError(ArithmeticError):
    """The formula gives no number for these rewards."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A parsed formula."""

    text: str
    steps: tuple[Step, ...]
    """The operations, each after what it is applied to."""

    @classmethod
    def parse(cls, text: str, names: Collection[str], param: str) -> Formula:
        """A formula over these names. Raises GraderRefused."""
        try:
            return cls(text, tuple(_Parser(text, names).parsed()))
        except SyntaxError as error:
            raise GraderRefused(f"{param}: {error.msg} in {text[:200]!r}.", param) from None

    @property
    def names(self) -> set[str]:
        """The names that it uses."""
        return {step for step in self.steps if isinstance(step, str)}

    def value(self, values: Mapping[str, float]) -> float:
        """Its value. Raises FormulaError where that is no finite number."""
        stack: list[float] = []
        try:
            for step in self.steps:
                if isinstance(step, tuple):
                    function, count = step
                    arguments = stack[-count:]
                    del stack[-count:]
                    stack.append(float(function(*arguments)))
                else:
                    stack.append(values[step] if isinstance(step, str) else step)
        except (ArithmeticError, ValueError) as error:
            raise FormulaError(f"{self.text[:200]!r}: {error}") from None
        (found,) = stack
        if not math.isfinite(found):
            raise FormulaError(f"{self.text[:200]!r} is {found}")
        return found


class _Parser:
    def __init__(self, text: str, names: Collection[str]) -> None:
        if len(text) > _LONGEST:
            raise SyntaxError(f"more than {_LONGEST:,} characters")
        self._names, self._tokens, self._depth, at = names, list[str](), 0, 0
        text = text.rstrip()
        while at < len(text):
            found = _TOKEN.match(text, at)
            if found is None:
                raise SyntaxError(f"unexpected {text[at:].lstrip()[:1]!r}")
            self._tokens.append(found.group().strip())
            at = found.end()
        self._tokens.reverse()
        self._steps: list[Step] = []

    def parsed(self) -> list[Step]:
        self._expression()
        if self._tokens:
            raise SyntaxError(f"unexpected {self._tokens[-1]!r}")
        return self._steps

    def _next(self, *wanted: str) -> str | None:
        """The next token, taken, if it is one of these."""
        return self._tokens.pop() if self._tokens and self._tokens[-1] in wanted else None

    def _need(self, wanted: str) -> None:
        if self._next(wanted) is None:
            raise SyntaxError(f"{wanted!r} is missing")

    def _expression(self) -> None:
        self._chain(self._term, "+", "-")

    def _term(self) -> None:
        self._chain(self._signed, "*", "/")

    def _chain(self, operand: Callable[[], None], *operators: str) -> None:
        operand()
        while sign := self._next(*operators):
            operand()
            self._steps.append((_BINARY[sign], 2))

    def _signed(self) -> None:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise SyntaxError(f"more than {_DEEPEST} levels")
        if sign := self._next("+", "-"):
            self._signed()
            self._steps.append((operator.neg if sign == "-" else operator.pos, 1))
        else:
            self._atom()
            if self._next("^"):
                self._signed()
                self._steps.append((_BINARY["^"], 2))
        self._depth -= 1

    def _atom(self) -> None:
        if not self._tokens:
            raise SyntaxError("a number or a name is missing at the end")
        token = self._tokens.pop()
        if token == "(":
            self._expression()
            self._need(")")
        elif token in FUNCTIONS:
            self._call(token)
        elif token in self._names:
            self._steps.append(token)
        elif token[0].isdecimal() or token[0] == ".":
            self._steps.append(float(token))
        elif token in "-+*/^(),":
            raise SyntaxError(f"unexpected {token!r}")
        else:
            raise SyntaxError(f"{token!r} is neither one of the graders ({', '.join(self._names)}) nor a function")

    def _call(self, name: str) -> None:
        function, least, most = FUNCTIONS[name]
        self._need("(")
        count = 1
        self._expression()
        while self._next(","):
            count += 1
            self._expression()
        self._need(")")
        if not least <= count <= most:
            raise SyntaxError(f"{name} takes {least if least == most else f'{least} to {most}'} arguments, not {count}")
        self._steps.append((function, count))
