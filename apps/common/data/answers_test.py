import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.common.data.answers import exact_reward, final_answer, same_answer


def test_gsm8k_reference_is_read_after_the_hashes() -> None:
    assert final_answer("She sold 48/2 = <<48/2=24>>24 clips.\n#### 1,072") == "1,072"
    assert final_answer("#### 3 and then \\boxed{4}") == "4"
    assert final_answer("no mark") is None


@pytest.mark.parametrize(
    ("given", "expected", "equal"),
    [
        ("1,200", "1200", True),
        ("18.0", "18", True),
        ("$18", "18", True),
        ("18", "81", False),
        ("x+1", "x+1", True),
        ("", "0", False),
        ("nan", "nan ", True),
    ],
)
def test_same_answer(given: str, expected: str, equal: bool) -> None:
    assert same_answer(given, expected) is equal


def test_an_answer_outside_the_mark_earns_nothing() -> None:
    assert exact_reward("the answer is 95", "95") == 0.0
    assert exact_reward("\\boxed{95}", "95") == 1.0
    assert exact_reward("\\boxed{94}, no: \\boxed{95}", "#### 95") == 1.0
    assert exact_reward("\\boxed{95} \\boxed{94}", "95") == 0.0


@given(st.text(), st.text())
def test_no_text_raises(reply: str, reference: str) -> None:
    assert exact_reward(reply, reference) in (0.0, 1.0)


@given(st.integers())
def test_a_number_equals_itself_with_thousands_marks(value: int) -> None:
    assert same_answer(f"{value:,}", str(value))
