"""`multi`: several graders, and a formula over their rewards."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from agentlightning.finetuning.graders.base import Grader, GraderFailed, GraderFields, Grading, Score
from agentlightning.finetuning.graders.formula import FUNCTIONS, Formula, FormulaError
from agentlightning.finetuning.graders.result import Errors, Grade

MOST_GRADERS = 100
"""Of one `multi`."""


@dataclass(frozen=True, kw_only=True)
class Multi(Grader):
    """The formula's value. It has none where a grader that the formula names has none."""

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
        if not isinstance(name, str) or not name.isidentifier() or name in FUNCTIONS:
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
