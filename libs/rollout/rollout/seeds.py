"""Seeds for the branches of a run: a function of names alone, never of order or place."""

import hashlib


def derive_seed(seed: int, *path: int | str) -> int:
    """Return a 63-bit seed for one branch of a run, the same on every machine."""
    digest = hashlib.blake2b(repr((seed, *path)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
