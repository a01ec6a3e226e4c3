"""Checks of the native engine's settings."""

from rollout.config import Admission, OnCommit


def check_settings(
    max_batch: int,
    prefill_tokens: int,
    keep_tokens: int,
    compact_below: float,
    on_commit: OnCommit,
    admit: Admission,
    kv_cache_memory_bytes: int | None = None,
) -> None:
    """Raise ValueError for settings out of their ranges."""
    if min(max_batch, prefill_tokens) < 1:
        raise ValueError(f"max_batch and prefill_tokens must be at least 1, got {max_batch} and {prefill_tokens}")
    if keep_tokens < 0:
        raise ValueError(f"keep_tokens is a count of tokens, 0 to keep nothing, got {keep_tokens}")
    if kv_cache_memory_bytes is not None and kv_cache_memory_bytes < 1:
        raise ValueError(f"kv_cache_memory_bytes is a number of bytes, or None, got {kv_cache_memory_bytes}")
    if not 0 <= compact_below <= 1:
        raise ValueError(f"compact_below is a share of rows in [0, 1], got {compact_below}")
    if on_commit not in ("keep", "recompute"):
        raise ValueError(f'on_commit is "keep" or "recompute", got {on_commit!r}')
    if admit not in ("any_step", "rounds"):
        raise ValueError(f'admit is "any_step" or "rounds", got {admit!r}')
