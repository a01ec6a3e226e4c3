"""Whether something is supported: Yes with the test that showed it, or No with the reason."""

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
