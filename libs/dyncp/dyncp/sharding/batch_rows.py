"""A batch as rows: one plain tensor a sample and key, and back. Works for dense and jagged keys of any shape."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import TensorDict, is_tensor_collection

from seqpack.batches.dicts import share_offsets
from seqpack.batches.jagged import is_jagged, jagged, ragged, samples_of

Row = dict[str, torch.Tensor]


class KeyForm(NamedTuple):
    """The form of a key. ragged_dim: the dimension of a row that varies, None for a dense key."""

    dtype: str
    ragged_dim: int | None


def key_forms(batch: TensorDict) -> dict[str, KeyForm]:
    """Return the form of every key; ValueError for a key that holds no tensor."""
    forms = {}
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or is_tensor_collection(value):
            raise ValueError(f"key {key!r} holds a {type(value).__name__}, not a tensor: drop it before merging")
        forms[key] = KeyForm(str(value.dtype).removeprefix("torch."), ragged(value).dim if is_jagged(value) else None)
    return forms


def to_rows(batch: TensorDict) -> list[Row]:
    """Return a dict of plain tensors for each sample."""
    columns = {}
    for key in key_forms(batch):
        value = batch.get(key)
        columns[key] = samples_of(value) if is_jagged(value) else list(value.unbind())
    return [{key: column[i] for key, column in columns.items()} for i in range(batch.batch_size[0])]


def from_rows(rows: Sequence[Row], forms: dict[str, KeyForm]) -> TensorDict:
    """Undo `to_rows`: stack rows where the key was dense, and join them into a jagged tensor where it was ragged."""
    columns = {key: [row[key] for row in rows] for key in forms}
    joined = {
        key: torch.stack(column) if forms[key].ragged_dim is None else jagged(column, forms[key].ragged_dim or 0)
        for key, column in columns.items()
    }
    return TensorDict(share_offsets(joined), batch_size=[len(rows)])
