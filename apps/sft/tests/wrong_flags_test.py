"""Every wrong flag of a command line is told at once, a line each, whichever parts of the settings they belong to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.common.testing import wrong_flags
from apps.common.testing.wrong_flags import assert_each_is_reported
from apps.sft.main import main

WRONG = {
    **wrong_flags.WRONG,
    "--batch-size": "-1",
    "--eval-rows": "0",
    "--epochs": "0",
    "--keep-checkpoints": "-1",
    "--eval-share": "1.5",
    "--max-tokens": "1",
    "--demonstrations": "3",
    "--data-processes": "0",
    "--text-column": "t",
    "--eval-data": "x.jsonl",
}
"""A value that its flag can't have, whatever the others are."""


@settings(max_examples=15)
@given(
    st.lists(st.sampled_from(sorted(WRONG)), min_size=1, max_size=6, unique=True), st.sampled_from([(), ("--plan",)])
)
def test_each_of_several_wrong_flags_has_its_line(flags: list[str], more: tuple[str, ...]) -> None:
    assert_each_is_reported(main, WRONG, flags, more)


@pytest.mark.parametrize("more", [(), ("--plan",)])
def test_all_of_them_are_told(more: tuple[str, ...]) -> None:
    assert_each_is_reported(main, WRONG, WRONG, more)
