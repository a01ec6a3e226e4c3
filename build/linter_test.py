"""The list of tests that the type checker finds fault with may only get shorter."""

import re
from pathlib import Path

from linter import held_to

LINES = [
    "libs/a/a/old_test.py:3: error: Too many arguments  [call-arg]",
    "libs/a/a/old_test.py:3: note: see above",
    "libs/a/a/new_test.py:7: error: Name is not defined  [name-defined]",
]


def test_what_is_not_excused_is_a_finding() -> None:
    """In a file of the list it is none."""
    assert held_to(LINES, ["libs/a/a/old_test.py"]) == ([LINES[2]], [])
    assert held_to(LINES, []) == ([LINES[0], LINES[2]], [])


def test_a_file_without_findings_leaves_the_list() -> None:
    """Whether it was mended or is gone."""
    assert held_to(LINES[:1], ["libs/a/a/old_test.py", "libs/a/a/gone_test.py"]) == ([], ["libs/a/a/gone_test.py"])


def test_the_list_is_in_order_and_no_longer_than_it_was() -> None:
    """130 files of 334 when it was made."""
    listed = Path(__file__).with_name("untyped_tests.txt").read_text().split()
    assert listed == sorted(set(listed))
    assert len(listed) <= 130
    assert all(re.fullmatch(r"(libs|apps)/\S+_test\.py", name) for name in listed)
