"""Templates of graders: `{{ item.answer }}`, `{{ sample.output_json.steps[0] }}`. Data is looked up, never run."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agentlightning.errors import GraderRefused
from agentlightning.reading import whole_number

_PLACE = re.compile(r"\{\{((?:(?!\{\{|\}\}).)*)\}\}", re.DOTALL)
"""Linear in the text, whatever is in it."""
_STEP = re.compile(r"""\s*(?:\.\s*([\w-]+)|\[\s*(?:(\d+)|'([^']*)'|"([^"]*)")\s*\])""")
_OF_SAMPLE = ("output_text", "output_json", "output_tools", "choices")

MOST_FILLED = 1 << 22
"""Characters of a filled template: a variable that stands in it many times is copied as often."""
Path = tuple[str | int, ...]


class MissingVariable(LookupError):
    """A template names what is not there; `of_output`: because the output is no JSON."""

    def __init__(self, written: str, of_output: bool) -> None:
        super().__init__(
            f"{{{{ {written} }}}}: {'the output is no JSON' if of_output else 'there is no such variable'}"
        )
        self.of_output = of_output


@dataclass(frozen=True, slots=True)
class Template:
    """A text with variables, as its pieces: a text, or the path of a variable with its spelling."""

    pieces: tuple[str | tuple[Path, str], ...]

    @classmethod
    def parse(cls, text: str, param: str) -> Template:
        """Raises GraderRefused for a variable that no item or sample can have."""
        pieces: list[str | tuple[Path, str]] = []
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


def _path(written: str, param: str) -> Path:
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


def _value(given: Any, path: Path, written: str) -> Any:
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
