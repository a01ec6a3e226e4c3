"""Can the heads of an attention layer be dealt over a group of ranks? Pure arithmetic, asked at plan time and again at
run time."""


def check_heads(query_heads: int, kv_heads: int, cp_size: int) -> None:
    """Raise ValueError where the heads cannot be divided evenly over the group."""
    if query_heads % cp_size:
        raise ValueError(
            f"Ulysses deals {query_heads} query heads over {cp_size} ranks, which does not divide: use method ring or "
            "all_gather, or a group size that divides the heads"
        )
    if query_heads % kv_heads:
        raise ValueError(f"{query_heads} query heads must be a multiple of the {kv_heads} key heads")


def kv_repeats(query_heads: int, kv_heads: int, cp_size: int) -> int:
    """Return the least number of copies of each key head with which every rank has those of its query heads."""
    check_heads(query_heads, kv_heads, cp_size)
    per_kv = query_heads // kv_heads
    return next(n for n in range(1, per_kv + 1) if per_kv % n == 0 and kv_heads * n % cp_size == 0)
