"""What the modules of the repositories are made of: functions of a list of numbers, and what may be wrong with each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A function: what it is to give, in words, and what it returns. {xs} is its list, {n} a number, {} the part that
    may be wrong: what is right there, or one of the others.
    """

    words: str
    returns: str
    right: str
    wrong: tuple[str, ...]


_KEPT, _MADE = "[x for x in {xs} if {}]", "[{} for x in {xs}]"
KINDS = {
    "total": Kind("The sum of the {xs}.", "{}", "sum({xs})", ("len({xs})", "max({xs})")),
    "count": Kind("The number of {xs}.", "{}", "len({xs})", ("sum({xs})", "min({xs})")),
    "highest": Kind("The largest of the {xs}.", "{}", "max({xs})", ("min({xs})", "sum({xs})")),
    "lowest": Kind("The smallest of the {xs}.", "{}", "min({xs})", ("max({xs})", "len({xs})")),
    "ranked": Kind("The {xs} in order.", "{}", "sorted({xs})", ("list({xs})", "sum({xs})")),
    "above": Kind("The {xs} above {n}.", _KEPT, "x > {n}", ("x < {n}", "x == {n}")),
    "below": Kind("The {xs} below {n}.", _KEPT, "x < {n}", ("x > {n}", "x == {n}")),
    "others": Kind("The {xs} other than {n}.", _KEPT, "x != {n}", ("x == {n}", "x < {n}")),
    "raised": Kind("The {xs}, each plus {n}.", _MADE, "x + {n}", ("x - {n}",)),
    "lowered": Kind("The {xs}, each less {n}.", _MADE, "x - {n}", ("x + {n}",)),
    "scaled": Kind("The {xs}, each times {n}.", _MADE, "x * {n}", ("x + {n}", "x - {n}")),
}
"""By name."""
MODULES = {"shop": "prices", "school": "marks", "garden": "heights", "race": "laps", "farm": "weights", "post": "sizes"}
"""The modules, and what their lists hold."""
NUMBERS = range(2, 8)
