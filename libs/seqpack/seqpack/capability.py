"""Whether something is supported: Yes with the test that showed it, or No with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Yes:
    """Supported; `evidence` names the test that showed it, as FILE::FUNCTION under its package."""

    evidence: str

    def __bool__(self) -> bool:
        return True


@dataclass(frozen=True)
class No:
    """Not supported, and why."""

    reason: str

    def __bool__(self) -> bool:
        return False


def capability_table(columns: Mapping[str, Mapping[str, Yes | No]]) -> str:
    """Return answers by feature, a column for each backend, as markdown: each Yes with its test, each No with why.

    Features that a backend does not know have an empty cell.
    """
    features = dict.fromkeys(feature for answers in columns.values() for feature in answers)
    rows = [["feature", *columns], ["---"] * (len(columns) + 1)]
    rows += [[feature, *(_cell(answers.get(feature)) for answers in columns.values())] for feature in features]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def tests_named(columns: Mapping[str, Mapping[str, Yes | No]]) -> list[tuple[str, str]]:
    """Return the files and functions of the tests that show every Yes, each pair once."""
    answers = [answer for column in columns.values() for answer in column.values() if isinstance(answer, Yes)]
    found = {answer.evidence: answer.evidence.partition("::") for answer in answers}
    return [(file, function) for file, _, function in found.values()]


def _cell(answer: Yes | No | None) -> str:
    if answer is None:
        return ""
    return f"yes: `{answer.evidence}`" if isinstance(answer, Yes) else f"no: {answer.reason}"
