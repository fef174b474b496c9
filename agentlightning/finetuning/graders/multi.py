"""`multi`: several graders, and a formula over their rewards, `calculate_output`. The formula is arithmetic, parsed and
never run as code:

    expression = term (("+" | "-") term)*            term  = signed (("*" | "/") signed)*
    signed     = ("+" | "-") signed | power          power = atom ("^" signed)?
    atom       = number | name | function "(" expression ("," expression)* ")" | "(" expression ")"

A sign binds less than `^`, which groups from the right: -2^2 is -4, 2^3^2 is 512.
"""

from __future__ import annotations

import asyncio
import math
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders.base import Grader, GraderFailed, GraderFields, Grading, Score
from agentlightning.finetuning.graders.result import Errors, Grade

MOST_GRADERS = 100
"""Of one `multi`."""
_TOKEN = re.compile(r"\s*(?:((?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)|([^\W\d]\w*)|([-+*/^(),]))")
_DEEPEST = 50
_LONGEST = 10_000

_FUNCTIONS: Mapping[str, tuple[Callable[..., Any], int, int]] = {
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

_Step = float | str | tuple[Callable[..., Any], int]
"""A number, a name, or a function and how many arguments it has, which come before it."""


@dataclass(frozen=True, kw_only=True)
class Multi(Grader):
    """The value of a formula over the rewards of graders; no reward where a grader that the formula names gave none."""

    type: ClassVar[str] = "multi"
    graders: Mapping[str, Grader]
    formula: Formula

    @property
    def models(self) -> frozenset[str]:
        return frozenset().union(*(grader.models for grader in self.graders.values()))

    @classmethod
    def of(cls, fields: GraderFields, name: str, graders: Mapping[str, Grader]) -> Multi:
        formula = Formula.parse(fields.text("calculate_output"), list(graders), fields.path("calculate_output"))
        fields.end()
        return cls(name=name, given=fields.given, graders=graders, formula=formula)

    async def grade(self, grading: Grading) -> Grade:
        began = time.monotonic()
        grades = await asyncio.gather(*(grader.grade(grading) for grader in self.graders.values()))
        parts = dict(zip(self.graders, grades, strict=True))
        reward, errors, why = self._total(parts)
        tokens = _summed([part.tokens for part in grades])
        seconds = time.monotonic() - began
        return Grade(self.name, self.type, reward, errors, why, seconds, parts, tokens).checked()

    def _total(self, parts: Mapping[str, Grade]) -> tuple[float | None, Errors, str | None]:
        errors = Errors.merged(part.errors for part in parts.values())
        rewards = {name: part.reward for name, part in parts.items() if part.reward is not None}
        for name in self.formula.names:
            if name not in rewards:
                return None, errors, f"The grader {name!r} failed: {parts[name].why}"
        try:
            return self.formula.value(rewards), errors, None
        except FormulaError as error:
            return None, Errors.merged([errors, Errors.of("formula_parse_error", str(error))]), str(error)

    async def score(self, grading: Grading) -> Score:
        """The total alone. Raises GraderFailed."""
        found = await self.grade(grading)
        if found.reward is None:
            raise GraderFailed("other_error", found.why or "It has no reward.")
        return Score(found.reward, found.tokens)


def graders_of(fields: GraderFields) -> Mapping[str, Any]:
    """The JSON of each grader by its name in the formula. One grader alone, as the client's types have it, has its own
    name. Raises GraderRefused."""
    found = fields.get("graders")
    if isinstance(found, Mapping) and isinstance(found.get("type"), str):
        found = {found.get("name"): found}
    if not isinstance(found, Mapping) or not found:
        raise fields.refused("graders", "has no grader; give an object with a grader for each name of the formula.")
    if len(found) > MOST_GRADERS:
        raise fields.refused("graders", f"has {len(found):,} graders; {MOST_GRADERS} at most work at the same time.")
    for name in found:
        if not isinstance(name, str) or not name.isidentifier() or name in _FUNCTIONS:
            raise fields.refused(
                f"graders.{name}", "is no name for a formula: give one of letters, digits and _ that is no function's."
            )
    return found


def _summed(used: list[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, Counter[str]] = {}
    for of_one in used:
        for model, usage in of_one.items():
            total.setdefault(model, Counter()).update(usage)
    return {model: dict(usage) for model, usage in total.items()}


class FormulaError(ArithmeticError):
    """The formula gives no number for these rewards."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A parsed formula."""

    text: str
    steps: tuple[_Step, ...]
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
        """The names that the formula uses."""
        return {step for step in self.steps if isinstance(step, str)}

    def value(self, values: Mapping[str, float]) -> float:
        """The value of the formula. Raises FormulaError where it is no finite number."""
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
        self._steps: list[_Step] = []

    def parsed(self) -> list[_Step]:
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
        elif token in _FUNCTIONS:
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
        function, least, most = _FUNCTIONS[name]
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
