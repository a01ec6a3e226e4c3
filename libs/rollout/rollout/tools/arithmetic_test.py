"""The calculator: Python's own arithmetic as the oracle; anything that is not arithmetic is a reason in words."""

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.tools.arithmetic import MAX_DEPTH, MAX_LENGTH, evaluate, show


class Exact:
    """Integers for `eval`, so that the oracle divides exactly. It only ever sees expressions made by this test."""

    def __init__(self, text: str) -> None:
        self.value: Fraction = eval(text, {"F": Fraction})  # the oracle of generated arithmetic


Pair = tuple[str, ...]  # as the tool reads it, as Python does
numbers: st.SearchStrategy[Pair] = st.integers(0, 99).map(lambda n: (str(n), f"F({n})"))
operators = st.sampled_from(["+", "-", "*", "/", "//", "%"])


def combine(children: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    return st.one_of(
        st.tuples(children, operators, children).map(lambda t: tuple(f"({t[0][i]}{t[1]}{t[2][i]})" for i in (0, 1))),
        st.tuples(children, operators, children).map(lambda t: tuple(f"{t[0][i]} {t[1]} {t[2][i]}" for i in (0, 1))),
        children.map(lambda c: (f"-{c[0]}", f"-{c[1]}")),
        st.tuples(children, st.integers(0, 3)).map(lambda t: (f"({t[0][0]})**{t[1]}", f"({t[0][1]})**{t[1]}")),
    )


@given(st.recursive(numbers, combine, max_leaves=8))
def test_values_are_pythons(pair: Pair) -> None:
    text, oracle = pair
    if len(text) > MAX_LENGTH:
        return
    try:
        expected = Exact(oracle).value
    except ZeroDivisionError:
        with pytest.raises(ValueError, match="zero"):
            evaluate(text)
        return
    assert evaluate(text) == expected


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("37+58", "95"), ("-2**2", "-4"), ("2**-1", "0.5"), ("2^3^2", "512"), ("7 // 2", "3"), ("-7 % 3", "2"),
        ("1/3", "0.3333333333"), ("0.1+0.2", "0.3"), ("3\u00d74\u00f76", "2"), ("1.50", "1.5"),
        ("((2))", "2"), ("2*-3", "-6"),
    ],
)  # fmt: skip
def test_known_values(text: str, value: str) -> None:
    assert show(evaluate(text)) == value


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "1+", "(1", "1)", "1 2", "x", "__import__('os').system('x')", "1;2", "1e5", "0x10",
        "1,000", "**", "2**0.5", "9**9**9", "2**65", "10**64*10**64*10**64*10**64", "-" * 100 + "1",
        "(" * (MAX_DEPTH + 2) + "1" + ")" * (MAX_DEPTH + 2),
        "1/0", "5%0", "0**-1", "1" * (MAX_LENGTH + 1), "\u0663+1", "1\x00", "1..2", "lambda: 1", "[1]", "1 if 1 else 2",
    ],
)  # fmt: skip
def test_anything_else_is_a_reason_in_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        evaluate(text)


@given(st.text(max_size=60))
def test_any_text_gives_a_number_or_a_reason(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert isinstance(evaluate(text), Fraction)
