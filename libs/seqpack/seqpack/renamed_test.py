"""Earlier names: the same values, whichever name the caller uses; both at once are refused."""

import inspect

import pytest

from seqpack.renamed import renamed, renamed_arguments


class Base:
    @renamed_arguments(parts="components")
    def __init__(self, components: int, **options: int) -> None:
        self.components, self.options = components, options

    def total(self) -> int:
        return self.components

    parts = renamed("components")
    summed = renamed("total")


class Double(Base):
    def total(self) -> int:
        return 2 * self.components


def test_earlier_names_are_taken() -> None:
    for one in (Base(3, other=1), Base(parts=3, other=1), Base(components=3, other=1)):  # type: ignore[call-arg]
        assert (one.components, one.parts, one.options, one.summed()) == (3, 3, {"other": 1}, 3)
    assert Double(3).summed() == 6, "the method of the class at hand"
    assert list(inspect.signature(Base).parameters) == ["components", "options"]


def test_both_names_are_refused() -> None:
    with pytest.raises(TypeError, match="parts is the earlier name of components: give one of them"):
        Base(components=3, parts=3)
