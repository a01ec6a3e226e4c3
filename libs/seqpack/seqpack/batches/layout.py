"""Which dimension of a key is ragged: the schema and the lengths of `input_ids` say it, not the label of torch."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from seqpack.batches.jagged import Ragged, flattened, is_jagged, jagged_from_values, ragged, settled
from seqpack.batches.schema import MEDIA_KEYS, ROUTED_EXPERTS, TOKEN_KEYS


def token_lengths(batch: Any) -> list[int] | None:
    """Return the tokens of each sample of a TensorDict; None where it has no jagged `input_ids`."""
    ids = batch.get("input_ids")
    return ragged(ids).lengths if is_jagged(ids) else None


def parts_of(key: str, value: Tensor, lengths: Sequence[int] | None) -> Ragged:
    """Return the parts of a key's jagged tensor: ragged along its tokens where it has one value for each of them."""
    parts = ragged(value)
    if lengths is None or key in MEDIA_KEYS:
        return parts
    return settled(parts, lengths, -1 if key in TOKEN_KEYS else 0 if key == ROUTED_EXPERTS else None)


def laid_out(key: str, value: Tensor, lengths: Sequence[int] | None) -> Tensor:
    """Return the jagged tensor of a key, laid out by `parts_of`."""
    label, parts = ragged(value).dim, parts_of(key, value, lengths)
    return value if parts.dim == label else jagged_from_values(flattened(parts), parts.lengths, parts.dim)
