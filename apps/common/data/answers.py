"""Finding the final answer in a reply, and comparing it with the reference, as the usual maths data sets mark them."""

import re
from decimal import Decimal, InvalidOperation

from rollout.rewards.boxed import boxed

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?")


def final_answer(text: str) -> str | None:
    r"""Return what a reply or a reference marks: the last \boxed{...}, else what follows the last ####, else None."""
    found = boxed(text)
    if found is None and "####" in text:
        found = text.rsplit("####", 1)[1]
    return found.strip() if found is not None else None


def same_answer(given: str, expected: str) -> bool:
    """Equal as text, or as numbers where both are numbers ("1,200" is "1200.0"; "$18" is "18")."""
    given, expected = given.strip(), expected.strip()
    if given == expected:
        return True
    left, right = _as_number(given), _as_number(expected)
    return left is not None and left == right


def exact_reward(reply: str, reference: str) -> float:
    """1.0 when the reply's marked answer equals the reference's, else 0.0; a reference without a mark is the answer."""
    given = final_answer(reply)
    expected = final_answer(reference)
    return float(given is not None and same_answer(given, expected if expected is not None else reference))


def _as_number(text: str) -> Decimal | None:
    text = text.strip("$%. \n")
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return Decimal(text.replace(",", ""))
    except InvalidOperation:
        return None
