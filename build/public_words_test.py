"""Public names of the libraries are of the field's words, and a planted name that is not is told with its file."""

from pathlib import Path

import pytest
from public_words import check_public_words, public_names, read_exceptions, read_field, words

ROOT = Path(__file__).parents[1]
FIELD = {"libs", "pack", "row", "engine", "config", "max", "length", "x", "some"}
SOME = "libs/x/x/some.py"


def test_the_libraries_have_the_words_of_the_field() -> None:
    """Whatever the test was given of them; //build:check_tree looks at the apps too, and for exceptions unused."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in (ROOT / "libs").glob("*/*/**/*.py")}
    names, exceptions = public_names(texts), read_exceptions()
    assert len(names) > 3000
    assert all(exceptions.values())
    assert check_public_words(names, read_field() | set(exceptions), {}) == []


def test_words_of_names() -> None:
    assert words("GRPOConfig_v2") == ["grpo", "config", "v"]
    assert words("--max-tokens") == ["max", "tokens"]
    assert words("HTTPServer") == ["http", "server"]


@pytest.mark.parametrize(
    "text",
    [
        "def told(): ...",
        "async def pack(told): ...",
        "def pack(*, told=1): ...",
        "class Told: ...",
        "class Row:\n    told: int",
        "class Row:\n    def told(self): ...",
        "class Row:\n    def __init__(self, told): ...",
        "TOLD = 1",
        "parser.add_argument('--told')",
        "x: Annotated[int, tyro.conf.arg(aliases=['--told'])] = 1",
    ],
)
def test_a_planted_word_is_named(text: str) -> None:
    (complaint,) = check_public_words(public_names({SOME: text}), FIELD, {})
    assert complaint.startswith(f"{SOME}: ")
    assert "'told' is in no identifier" in complaint


@pytest.mark.parametrize(
    "text",
    [
        "def pack(rows, max_lengths): ...",
        "def _told(told): ...",
        "class _Told:\n    told: int",
        "class Row:\n    def _told(self, told): ...",
        "def pack():\n    told = 1",
        "Told = Row",
        "class Row:\n    told = renamed('row')",
    ],
)
def test_words_of_the_field_plurals_aliases_and_private_names_are_left_alone(text: str) -> None:
    assert check_public_words(public_names({SOME: text, "libs/x/x/some_test.py": "TOLD = 1"}), FIELD, {}) == []


def test_an_exception_has_a_reason_and_a_use() -> None:
    names = public_names({SOME: "def told(tolds): ..."})
    assert check_public_words(names, FIELD, {"told": "a reason"}) == []
    for exceptions in (
        {"told": ""},
        {"told": "a reason", "row": "of the field"},
        {"told": "a reason", "gone": "unused"},
    ):
        (complaint,) = check_public_words(names, FIELD, exceptions)
        assert "has no reason, or is of the field, or of no public name" in complaint
