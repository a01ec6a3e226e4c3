"""The final answer of a reply, and its comparison with the reference, as the usual maths data sets mark them."""

import re
from decimal import Decimal, InvalidOperation

from rollout.rewards.boxed import boxed

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def final_answer(text: str) -> str | None:
    r"""Return what a reply or a reference marks: the last \boxed{...}, else what follows the last ####, else None."""
    answer = boxed(text)
    if answer is None and "####" in text:
        answer = text.rsplit("####", 1)[1]
    return answer.strip() if answer is not None else None


def same_answer(answer: str, expected: str) -> bool:
    """Return whether two answers are equal texts, or equal numbers ("1,200" is "1200.0"; "$18" is "18")."""
    answer, expected = answer.strip(), expected.strip()
    if answer == expected:
        return True
    left, right = _as_number(answer), _as_number(expected)
    return left is not None and left == right


def exact_reward(reply: str, reference: str) -> float:
    """Return 1.0 where the reply's marked answer equals the reference's (or the unmarked reference), else 0.0."""
    answer = final_answer(reply)
    expected = final_answer(reference)
    return float(answer is not None and same_answer(answer, expected if expected is not None else reference))


def _as_number(text: str) -> Decimal | None:
    text = text.strip("$%. \n")
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
