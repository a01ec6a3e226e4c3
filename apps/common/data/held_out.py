"""The held-out rows of a file: a share of the different ones, chosen by their content and not by their order."""

import hashlib
from collections.abc import Iterable


def held_out_keys(keys: Iterable[str], share: float, most: int | None = None) -> set[str]:
    """Return about `share` of the different keys, at least one and at most `most`: the first in order of their hashes.

    Equal keys are on one side, and the order of the rows makes no difference.
    """
    ordered = sorted(set(keys), key=lambda key: hashlib.blake2b(key.encode(), digest_size=8).digest())
    count = max(1, round(len(ordered) * share))
    return set(ordered[: count if most is None else min(count, most)])
