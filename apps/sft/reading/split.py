"""The split into training and held-out samples, by the keys of their conversations."""

from collections.abc import Sequence
from dataclasses import dataclass

from apps.common.data.held_out import held_out_keys


@dataclass(frozen=True, slots=True)
class Split:
    """Indices of the samples on either side, and of those left out because the held-out file has them too.

    Every index is in exactly one of the three, in order; no key is in both `train` and `held_out`.
    """

    train: tuple[int, ...]
    held_out: tuple[int, ...]
    removed: tuple[int, ...] = ()


def split_off(keys: Sequence[str], share: float, most: int | None = None) -> Split:
    """Split off about `share` of the different keys as held out, at most `most`; equal keys stay on one side."""
    chosen = held_out_keys(keys, share, most) if keys else set()
    return Split(
        tuple(i for i, key in enumerate(keys) if key not in chosen),
        tuple(i for i, key in enumerate(keys) if key in chosen),
    )


def split_against(keys: Sequence[str], held_out: Sequence[str]) -> Split:
    """Remove from `keys` exactly those that are in `held_out`, a file of its own with its own indices."""
    excluded = set(held_out)
    return Split(
        tuple(i for i, key in enumerate(keys) if key not in excluded),
        tuple(range(len(held_out))),
        tuple(i for i, key in enumerate(keys) if key in excluded),
    )
