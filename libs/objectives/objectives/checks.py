"""Checks of options, made where a dataclass is made: each ValueError names the option, what it got and what to use."""

import math
from collections.abc import Callable, Iterable


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of `choices`."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(f"unknown {name} {value!r}: use one of {', '.join(choices)}")


def check_number(name: str, value: object, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Raise ValueError unless `value` is a number in [low, high], or in (low, high] with `above`; always for NaN."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and low <= value <= high and not (above and value == low):  # type: ignore[operator]
        return
    if high == math.inf:
        wanted = f"{'above' if above else 'at least'} {low:g}"
    else:
        wanted = f"{'above' if above else 'from'} {low:g} {'and at most' if above else 'to'} {high:g}"
    raise ValueError(f"{name} must be a number {wanted}, got {value!r}")


def check_weight(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number of at least 0: the weight of a term of the loss."""
    check_number(name, value, 0)
    if value == math.inf:
        raise ValueError(f"{name} must be finite, got {value!r}")


def check_without_effect(name: str, value: object, reason: str) -> None:
    """Raise ValueError if an option is set (not None) that has no effect; `reason` says why and what to do."""
    if value is not None:
        raise ValueError(f"{name}={value!r} has no effect: {reason}")


def gathered(checks: Iterable[Callable[[], object]]) -> list[str]:
    """Return the texts of the ValueErrors that these checks raise."""
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as error:
            problems.append(str(error))
    return problems
