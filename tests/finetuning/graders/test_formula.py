"""The formula of a multi grader: the same arithmetic as Python's, and nothing but arithmetic."""

from __future__ import annotations

import contextlib
import math

import pytest
from hypothesis import given, strategies as st

from agentlightning.errors import GraderRefused
from agentlightning.finetuning.graders.multi import Formula, FormulaError

VALUES = {"a": 0.25, "b": 2.0, "exact_match": -1.5}


def value(text: str) -> float:
    return Formula.parse(text, list(VALUES), "calculate_output").value(VALUES)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0.5 * a + 0.5 * b", 1.125),
        ("-b ^ 2", -4.0),
        ("2 ^ 3 ^ 2", 512.0),
        ("2 ^ -1", 0.5),
        ("(a + b) * -exact_match", 3.375),
        ("min(a, b, 1) + max(a, b)", 2.25),
        ("min(a)", 0.25),
        ("floor(1.7) + ceil(1.2) + abs(exact_match)", 4.5),
        ("exp(log(sqrt(b ^ 2)))", 2.0),
        ("1e-1 + .5", 0.6),
        ("--b", 2.0),
    ],
)
def test_examples(text: str, expected: float) -> None:
    assert value(text) == pytest.approx(expected, rel=1e-12)


def expressions() -> st.SearchStrategy[str]:
    numbers = st.floats(0, 100).map(lambda x: repr(round(x, 3)))
    names = st.sampled_from(list(VALUES))

    def larger(smaller: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
        return st.one_of(
            st.tuples(smaller, st.sampled_from([" + ", "-", "*", " / ", "^"]), smaller).map("".join),
            smaller.map(lambda e: f"({e})"),
            smaller.map(lambda e: f"-{e}"),
            st.tuples(smaller, smaller).map(lambda pair: f"max({pair[0]}, {pair[1]})"),
            smaller.map(lambda e: f"floor({e})"),
        )

    return st.recursive(st.one_of(numbers, names), larger, max_leaves=8)


@given(expressions())
def test_it_agrees_with_python(text: str) -> None:
    try:
        names = {**VALUES, "max": max, "floor": lambda x: float(math.floor(x))}
        expected = eval(text.replace("^", "**"), {"__builtins__": {}}, names)
    except (ArithmeticError, ValueError, TypeError):  # a complex power is not for floor
        expected = math.nan
    if isinstance(expected, complex) or not math.isfinite(expected):
        with pytest.raises(FormulaError):
            value(text)
    else:
        assert value(text) == pytest.approx(expected, rel=1e-9)


@given(st.text(alphabet="ab+-*/^(), 1.e_[]'\"=:", max_size=40) | st.text(max_size=20))
def test_no_text_does_more_than_be_refused_or_have_a_value(text: str) -> None:
    with contextlib.suppress(GraderRefused, FormulaError):
        assert math.isfinite(value(text))


@pytest.mark.parametrize(
    "text",
    [
        *("", "a b", "a +", "c", "a.real", "__import__('os')", "item.x", "min()", "abs(a, b)", "min", "(a", "a)"),
        *("a ** b", "a // b", "a if b else a", "[a]", "'a'", "1_0", "0x1", "(" * 1000 + "a" + ")" * 1000, "-" * 1000),
        *("^".join("a" * 500), "a+" * 9000),
    ],
)
def test_what_is_no_formula_is_refused(text: str) -> None:
    with pytest.raises(GraderRefused) as refused:
        value(text)
    assert refused.value.param == "calculate_output"


@pytest.mark.parametrize("text", ["1 / (a - a)", "exp(1000)", "log(a - a)", "sqrt(exact_match)", "1e999", "1e308 * 10"])
def test_what_gives_no_number_is_an_error(text: str) -> None:
    with pytest.raises(FormulaError):
        value(text)


def test_long_sums_need_no_recursion() -> None:
    assert value("+".join(["b"] * 4000)) == 8000.0
