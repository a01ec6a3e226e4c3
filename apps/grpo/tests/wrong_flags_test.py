"""Every wrong flag of a command line is told at once, a line each, whichever parts of the settings they belong to."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.common.testing import wrong_flags
from apps.common.testing.wrong_flags import assert_each_is_reported
from apps.grpo.main import main

WRONG = {
    **wrong_flags.WRONG,
    "--group-size": "0",
    "--logging.groups": "-1",
    "--environment-memory-gib": "0",
    "--environment-processes": "-1",
    "--environment-servers": "x",
    "--max-episode-seconds": "0",
    "--stall-seconds": "0",
    "--eval-share": "2",
    "--digits": "0",
    "--max-prompt-tokens": "0",
    "--system-prompt": " ",
    "--template-options": "x",
    "--tool-format": "no such",
    "--tasks": "x.jsonl",
    "--sampling.temperature": "0",
    "--sampling.max-new-tokens": "0",
    "--objective.clip-low": "2",
    "--objective.kl-coef": "-1",
    "--objective.off-policy-cap": "3",
    "--objective.max-tokens": "3",
    "--warm-start.eval-every": "0",
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
