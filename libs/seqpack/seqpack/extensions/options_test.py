"""Options of user code: read by the types of a signature, and every wrong word told with the right ones."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from seqpack.extensions.options import bound, options_of, read_options, split_words


def loss(  # type: ignore[no-untyped-def]
    tokens: object,
    tau: float = 0.5,
    *,
    mode: Literal["hard", "soft"] = "hard",
    most: int | None = None,
    folder: Path = Path("x"),
    sizes: tuple[int, ...] = (1,),
    fast: bool = False,
    plain=3,  # noqa: ANN001
) -> dict[str, Any]:
    """Return what it was given."""
    values = {"tau": tau, "mode": mode, "most": most, "folder": folder, "sizes": sizes, "fast": fast, "plain": plain}
    return {"tokens": tokens, **values}


@dataclass(frozen=True)
class Sampler:
    """Options are the fields of a dataclass."""

    name: str
    width: int = 2


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ((), {}),
        (("tau=1",), {"tau": 1.0}),
        (("tau=1e-3", "mode=soft"), {"tau": 1e-3, "mode": "soft"}),
        (("most=4",), {"most": 4}),
        (("most=None",), {"most": None}),
        (("folder=a/b=c",), {"folder": Path("a/b=c")}),
        (("sizes=1,2,3", "fast=true"), {"sizes": (1, 2, 3), "fast": True}),
        (("fast=False", "plain=7"), {"fast": False, "plain": 7}),
    ],
)
def test_words_have_the_types_of_the_signature(words: tuple[str, ...], values: dict[str, Any]) -> None:
    found = read_options("--loss-options", "mine.py:loss", loss, words, first=1)
    assert found == values
    assert {name: type(value) for name, value in found.items()} == {name: type(v) for name, v in values.items()}
    assert bound("--loss-options", "mine.py:loss", loss, words, first=1)("t") == loss("t", **values)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("taw=1",), "there is no option 'taw', did you mean tau?"),
        (("tokens=1",), "there is no option 'tokens'"),
        (("tau=hot",), "tau: float = 0.5 can't be 'hot'"),
        (("mode=warm",), "mode: Literal['hard', 'soft'] = 'hard' can't be 'warm'"),
        (("most=1.5",), "most: int | None = None can't be '1.5'"),
        (("fast=maybe",), "fast: bool = False can't be 'maybe'"),
        (("sizes=1,x",), "sizes: tuple[int, ...] = (1,) can't be '1,x'"),
        (("tau",), "'tau' is not NAME=VALUE"),
        (("tau=1", "tau=2"), "tau is given twice"),
        (("tau=x", "zz=1"), "tau: float = 0.5 can't be 'x'; there is no option 'zz'"),
        (("zz=1",), "(mine.py:loss; its options: tau: float = 0.5, mode: Literal['hard', 'soft'] = 'hard', most:"),
    ],
)
def test_a_wrong_word_is_told_with_the_right_ones(words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)) as refused:
        read_options("--loss-options", "mine.py:loss", loss, words, first=1)
    assert str(refused.value).startswith("--loss-options: ")


def test_a_class_and_what_must_be_given() -> None:
    assert [str(option) for option in options_of(Sampler)] == ["name: str", "width: int = 2"]
    assert bound("--sampler-options", "s", Sampler, ("name=a", "width=3"))() == Sampler("a", 3)
    with pytest.raises(ValueError, match="--sampler-options: name must be given"):
        read_options("--sampler-options", "s", Sampler, ("width=3",))


def test_what_has_no_options_says_so() -> None:
    def plain(tokens: object) -> object:
        return tokens

    assert bound("--loss-options", "ppo", plain, (), first=1) is plain
    with pytest.raises(ValueError, match=re.escape("(ppo; it has no options)")):
        read_options("--loss-options", "ppo", plain, ("tau=1",), first=1)


def test_words_for_several_go_to_those_that_take_them() -> None:
    def tool(seconds: float = 1.0, width: int = 2) -> None:
        """Take two options, one of them by the name of another's."""

    words = split_words({"a": Sampler, "b": tool}, ("name=x", "width=3", "seconds=2", "zz=1"))
    assert words == {"a": ("name=x", "width=3", "zz=1"), "b": ("width=3", "seconds=2", "zz=1")}


def test_a_type_that_no_word_gives_is_refused() -> None:
    def needs(tokens: object, table: dict[str, int]) -> None:
        """Take what a word can't give."""

    wrong: Callable[..., Any] = needs
    with pytest.raises(ValueError, match=r"table: .*has a type that NAME=VALUE can't give"):
        options_of(wrong, first=1)
