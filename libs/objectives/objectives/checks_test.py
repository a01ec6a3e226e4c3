import math

import pytest

from objectives.checks import check_choice, check_number, check_weight, check_without_effect

NEVER = [math.nan, "1", None, True, False, [1], 1j]


def test_choice() -> None:
    check_choice("colour", "red", ("red", "blue"))
    for value in ("green", "", None, 3):
        with pytest.raises(ValueError, match=f"^unknown colour {value!r}: use one of red, blue$"):
            check_choice("colour", value, iter(("red", "blue")))


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "wanted"),
    [
        ((2,), [2, 2.0, 3, math.inf], [1.999, -1, -math.inf], "at least 2"),
        ((2, 5), [2, 3.5, 5], [1.999, 5.001, math.inf], "from 2 to 5"),
        ((-1, 0.5), [-1, 0, 0.5], [-1.001, 0.6, 1], "from -1 to 0.5"),
    ],
)
def test_number(bounds: tuple[float, ...], good: list[float], bad: list[float], wanted: str) -> None:
    for value in good:
        check_number("size", value, *bounds)
    for wrong in bad + NEVER:
        with pytest.raises(ValueError) as error:
            check_number("size", wrong, *bounds)
        assert str(error.value) == f"size must be a number {wanted}, got {wrong!r}"


@pytest.mark.parametrize(("bounds", "wanted"), [((2,), "above 2"), ((2, 5), "above 2 and at most 5")])
def test_number_above(bounds: tuple[float, ...], wanted: str) -> None:
    for value in (2.001, 5):
        check_number("size", value, *bounds, above=True)
    for wrong in [2, 2.0, 1, *NEVER]:
        with pytest.raises(ValueError) as error:
            check_number("size", wrong, *bounds, above=True)
        assert str(error.value) == f"size must be a number {wanted}, got {wrong!r}"


def test_weight() -> None:
    for value in (0, 0.0, 1e-9, 1e9):
        check_weight("coef", value)
    for wrong in [-1e-9, -1, *NEVER]:
        with pytest.raises(ValueError, match="coef must be a number at least 0"):
            check_weight("coef", wrong)
    with pytest.raises(ValueError, match="coef must be finite, got inf"):
        check_weight("coef", math.inf)


def test_without_effect() -> None:
    check_without_effect("cap", None, "never")
    for value in (0, 1.5, ""):
        with pytest.raises(ValueError, match=f"^cap={value!r} has no effect: turn it on$"):
            check_without_effect("cap", value, "turn it on")
