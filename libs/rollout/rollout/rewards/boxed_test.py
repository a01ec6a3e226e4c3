"""Marked answers."""

import pytest

from rollout.chat.messages import Reply
from rollout.rewards.boxed import boxed, exact_answer


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"\boxed{95}", "95"),
        (r"\boxed{1} then \boxed{ 2 }", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{3} and \boxed{4", "3"),
        (r"\boxed{", None),
        ("95", None),
        ("", None),
        (r"\boxed{}", ""),
    ],
)
def test_the_last_complete_mark_counts(text: str, found: str | None) -> None:
    assert boxed(text) == found


def test_the_reward_is_exact_but_for_blanks() -> None:
    reward = exact_answer("1 000")
    assert reward(Reply(text="", content=r"so \boxed{1000 }"), ()) == 1.0
    assert reward(Reply(text="", content=r"\boxed{1001}"), ()) == 0.0
    assert reward(Reply(text=r"\boxed{1000}", content=""), ()) == 0.0  # an answer given in thought does not count
