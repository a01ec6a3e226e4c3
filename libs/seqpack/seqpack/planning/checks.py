"""Validation of user input: every ValueError names the offending index and value."""

import sys
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


class Array(Protocol):
    """A numpy array or a torch tensor of one dimension."""

    def tolist(self) -> Any:
        """Return the values as plain numbers."""


def check_positive_int(value: Any, name: str) -> int:
    """Return `value` as an int, or raise ValueError when it is not a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} must be a positive integer, got {value!r}")
    return int(value)


def check_lengths(lengths: Any, cap: int | None = None, name: str = "lengths", minimum: int | None = 1) -> list[int]:
    """Return the lengths as ints; each must be an integer in `minimum`..`cap` (None: no limit).

    Takes any sequence, numpy array or one-dimensional torch tensor of integers.
    """
    items = _as_list(lengths, name)
    if not set(map(type, items)) <= {int}:  # one pass in C for the common case
        for index, length in enumerate(items):
            if isinstance(length, bool) or not isinstance(length, int | np.integer):
                raise ValueError(f"{name}[{index}] must be an integer, got {length!r}")
        items = [int(length) for length in items]
    if items and minimum is not None and min(items) < minimum:
        index = next(i for i, length in enumerate(items) if length < minimum)
        raise ValueError(f"{name}[{index}] must be at least {minimum}, got {items[index]}")
    if items and cap is not None and max(items) > cap:
        index = next(i for i, length in enumerate(items) if length > cap)
        raise ValueError(
            f"{name}[{index}] = {items[index]} does not fit in {cap}: cut it, leave it out, or raise the limit"
        )
    return items


def check_costs(costs: Any, name: str = "costs") -> NDArray[np.float64]:
    """Return the costs as float64; each must be finite and not negative."""
    items = _as_list(costs, name)
    if not set(map(type, items)) <= {int, float}:
        for index, cost in enumerate(items):
            if isinstance(cost, bool) or not isinstance(cost, int | float | np.integer | np.floating):
                raise ValueError(f"{name}[{index}] must be a number, got {cost!r}")
    try:
        values = np.array(items, dtype=np.float64)
    except OverflowError as error:
        index = next(i for i, cost in enumerate(items) if abs(cost) > sys.float_info.max)
        raise ValueError(f"{name}[{index}] is more than a float holds") from error
    wrong = np.flatnonzero(~np.isfinite(values) | (values < 0))
    if len(wrong):
        raise ValueError(f"{name}[{wrong[0]}] must be finite and not negative, got {items[wrong[0]]}")
    if float(values.max(initial=0.0)) * max(1, len(values)) == np.inf:
        raise ValueError(f"{name} add up to more than a float holds, the largest is {values.max()}: use a larger unit")
    return values


def check_indices(indices: Any, size: int, name: str = "indices") -> list[int]:
    """Return the indices as ints; each must lie in 0..size-1 (negative ones are refused: plans have none)."""
    items = check_lengths(indices, name=name, minimum=0)
    for position, index in enumerate(items):
        if index >= size:
            raise ValueError(f"{name}[{position}] = {index} is out of range for {size} samples")
    return items


def _as_list(values: Any, name: str) -> list[Any]:
    if hasattr(values, "tolist"):  # numpy arrays and torch tensors, to plain numbers in one pass
        values = values.tolist()
    if isinstance(values, str | bytes) or not isinstance(values, Sequence):
        raise ValueError(f"{name} must be a sequence of numbers, got {type(values).__name__}")
    return list(values)
