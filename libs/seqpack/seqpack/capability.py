"""Answers to whether something is supported: with the test that showed it, or with the reason against it."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Supported:
    """Supported; `evidence` names the test that showed it, as FILE::FUNCTION under its package."""

    evidence: str

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class Unsupported:
    """Not supported, and why."""

    reason: str
    untested: str | None = None
    """Name by which a user may have it untested, where the code is there and the hardware to run it was not."""

    def __bool__(self) -> bool:
        return False


Yes = Supported
No = Unsupported
"""Earlier names."""


def capability_table(columns: Mapping[str, Mapping[str, Supported | Unsupported]]) -> str:
    """Return a Markdown table: a row a feature, a column a backend, with tests and reasons.

    Features that a backend does not know have an empty cell.
    """
    features = dict.fromkeys(feature for answers in columns.values() for feature in answers)
    rows = [["feature", *columns], ["---"] * (len(columns) + 1)]
    rows += [[feature, *(_cell(answers.get(feature)) for answers in columns.values())] for feature in features]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def tests_named(columns: Mapping[str, Mapping[str, Supported | Unsupported]]) -> list[tuple[str, str]]:
    """Return (file, function) of the tests that stand behind supported features, each pair once."""
    answers = [answer for column in columns.values() for answer in column.values() if isinstance(answer, Supported)]
    tests = {answer.evidence: answer.evidence.partition("::") for answer in answers}
    return [(file, function) for file, _, function in tests.values()]


def _cell(answer: Supported | Unsupported | None) -> str:
    if answer is None:
        return ""
    return f"yes: `{answer.evidence}`" if isinstance(answer, Supported) else f"no: {answer.reason}"
