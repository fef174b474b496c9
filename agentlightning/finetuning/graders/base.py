"""What every grader is (a name, the JSON it was read from, and `grade`), and the templates that graders fill: `{{
item.answer }}`, `{{ sample.output_json.steps[0] }}`. Templates look data up and never run it.
"""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders.result import Errors, Grade, Models, Sample
from agentlightning.reading import whole_number


@dataclass(frozen=True, slots=True)
class Grading:
    """One sample to grade, with the item it answers and the models that may be asked."""

    item: Mapping[str, Any]
    sample: Sample
    models: Models | None = None

    def fill(self, template: Template) -> str:
        """The template with its variables' values. Raises MissingVariable."""
        return template.fill(self.item, self.sample.as_dict())


@dataclass(frozen=True, slots=True)
class Score:
    """What a grader found, and what that took."""

    reward: float
    tokens: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    model: str | None = None


class GraderFailed(Exception):
    """A grader did not come to a reward: the flag of `Errors` that says so, and why."""

    def __init__(self, flag: str, why: str, score: Score | None = None) -> None:
        super().__init__(why)
        self.errors = Errors.of(flag, why)
        self.score = score
        """What the grader found until then, for the tokens of models that it asked."""


@dataclass(frozen=True, kw_only=True)
class Grader(ABC):
    """A grader, as it was read from JSON."""

    type: ClassVar[str]
    name: str
    given: Mapping[str, Any] = field(repr=False)
    """The JSON it was read from."""

    @property
    def lowest(self) -> float:
        """The reward of an output that is no JSON, where JSON is graded."""
        return 0.0

    @property
    def models(self) -> frozenset[str]:
        """The names of the models that the grader asks."""
        return frozenset()

    @abstractmethod
    async def score(self, grading: Grading) -> Score:
        """The reward. Raises GraderFailed or MissingVariable."""

    async def grade(self, grading: Grading) -> Grade:
        """The reward, or why there is none; raises nothing of its own."""
        began = time.monotonic()
        errors, why, reward, score = Errors(), None, None, None
        try:
            score = await self.score(grading)
            reward = score.reward
        except MissingVariable as missing:
            why = str(missing)
            errors = Errors.of("sample_parse_error" if missing.of_output else "invalid_variable_error", why)
            reward = self.lowest if missing.of_output else None
        except GraderFailed as failed:
            errors, why, score = failed.errors, str(failed), failed.score
        except Exception as error:  # a library's, on texts nobody foresaw: the training goes on without the sample
            why = f"{type(error).__name__}: {error}"
            errors = Errors.of("other_error", why)
        score = score or Score(0.0)
        found = Grade(
            self.name, self.type, reward, errors, why, time.monotonic() - began, {}, score.tokens, score.model
        )
        return found.checked()


class GraderFields:
    """The fields of a grader's JSON. Whatever is wrong with one is refused with its path."""

    def __init__(self, given: Any, param: str) -> None:
        self.param = param
        if not isinstance(given, Mapping):
            raise GraderRefused(f"{param} is {_short(given)}; give an object.", param)
        self.given: Mapping[str, Any] = given
        self._read = {"type", "name"}

    def path(self, name: str) -> str:
        return f"{self.param}.{name}"

    def refused(self, name: str, why: str) -> GraderRefused:
        """The error for a field."""
        return GraderRefused(f"{self.path(name)} {why}", self.path(name))

    def get(self, name: str) -> Any:
        """The field; None where it is not given."""
        self._read.add(name)
        return self.given.get(name)

    def text(self, name: str, default: str | None = None) -> str:
        """A field that is a text; needed, unless there is a default."""
        found = self.get(name)
        if found is None and default is not None:
            return default
        if not isinstance(found, str):
            raise self.refused(name, "is missing." if found is None else f"is {_short(found)}; give a text.")
        return found

    def template(self, name: str) -> Template:
        return Template.parse(self.text(name), self.path(name))

    def one_of(self, name: str, known: Sequence[str], also: Mapping[str, str] | None = None) -> str:
        """One of the known values; `also` has further spellings of them."""
        found = (also or {}).get(self.text(name), self.text(name))
        if found not in known:
            raise self.refused(name, f"is {_short(found)}; it can be {', '.join(known)}.")
        return found

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts, at least one."""
        found = self.get(name)
        if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
            raise self.refused(name, "is missing." if found is None else f"is {_short(found)}; give a list of texts.")
        return tuple(found)

    def end(self, *tolerated: str) -> None:
        """Refuse what was not read, by its name; `tolerated` fields have a meaning where graders do not train."""
        unknown = sorted(str(name) for name in self.given if name not in self._read and name not in tolerated)
        if unknown:
            raise self.refused(unknown[0], f"is no field of a grader of type {self.given.get('type')!r}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


_PLACE = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*)\}\}", re.DOTALL)
"""A variable in a template. Matching takes time linear in the text, whatever is in it."""
_STEP = re.compile(r"""\s*(?:\.\s*([\w-]+)|\[\s*(?:(\d+)|'([^']*)'|"([^"]*)")\s*\])""")
_OF_SAMPLE = ("output_text", "output_json", "output_tools", "choices")

MOST_FILLED = 1 << 22
"""Characters of a filled template: a variable that stands in it many times is copied as often."""
_Path = tuple[str | int, ...]


class MissingVariable(LookupError):
    """A template names a variable that is not there; `of_output`: because the output is no JSON."""

    def __init__(self, written: str, of_output: bool) -> None:
        super().__init__(
            f"{{{{ {written} }}}}: {'the output is no JSON' if of_output else 'there is no such variable'}"
        )
        self.of_output = of_output


@dataclass(frozen=True, slots=True)
class Template:
    """A text with variables, as its pieces: a text, or the path of a variable with its spelling."""

    pieces: tuple[str | tuple[_Path, str], ...]

    @classmethod
    def parse(cls, text: str, param: str) -> Template:
        """Raises GraderRefused for a variable that no item or sample can have."""
        pieces: list[str | tuple[_Path, str]] = []
        for number, part in enumerate(_PLACE.split(text)):
            part = part.strip() if number % 2 else part
            pieces.append((_path(part, param), part) if number % 2 else part)
        return cls(tuple(piece for piece in pieces if piece != ""))

    def fill(self, item: Any, sample: Mapping[str, Any]) -> str:
        """The text with every variable's value; what is no text is written as JSON. Raises MissingVariable, and
        ValueError for more than `MOST_FILLED` characters."""
        given, filled, size = {"item": item, "sample": sample}, list[str](), 0
        for piece in self.pieces:
            filled.append(piece if isinstance(piece, str) else _written(_value(given, piece[0], piece[1])))
            size += len(filled[-1])
            if size > MOST_FILLED:
                raise ValueError(f"a template with its values has more than {MOST_FILLED:,} characters")
        return "".join(filled)


def _path(written: str, param: str) -> _Path:
    root = re.match(r"item|sample", written)
    at, steps = root.end() if root else 0, list[str | int]()
    while root and (step := _STEP.match(written, at)):
        name, index, *quoted = step.groups()
        number = None if index is None else whole_number(index)
        steps.append(next(s for s in (number, name, *quoted, index) if s is not None))
        at = step.end()
    if root is None or at != len(written):
        raise GraderRefused(
            f"{param}: {{{{ {written} }}}} is no variable. Templates take {{{{ item.… }}}} and {{{{ sample.… }}}} with "
            "names and indices, such as {{ item.answer }} or {{ sample.output_json.steps[0] }}.",
            param,
        )
    if root.group() == "sample" and steps and steps[0] not in _OF_SAMPLE:
        raise GraderRefused(f"{param}: a sample has no {steps[0]!r}; it has {', '.join(_OF_SAMPLE)}.", param)
    return (root.group(), *steps)


def _value(given: Any, path: _Path, written: str) -> Any:
    if path[:2] == ("sample", "output_json") and given["sample"]["output_json"] is None:
        raise MissingVariable(written, of_output=True)
    for step in path:
        if isinstance(given, Mapping) and str(step) in given:
            given = given[str(step)]
        elif isinstance(given, list) and (at := whole_number(str(step))) is not None and at < len(given):
            given = given[at]
        else:
            raise MissingVariable(written, of_output=False)
    return given


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
