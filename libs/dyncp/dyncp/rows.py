"""A batch as rows: one plain tensor a sample and key, and back. Works for dense and jagged keys of any rank."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from tensordict import NonTensorData, TensorDict, is_tensor_collection

Row = dict[str, torch.Tensor]


class KeyForm(NamedTuple):
    """How a key is put together from rows. ragged_dim: counted from the end of a row, 0 for a dense key."""

    dtype: str
    ragged_dim: int


def key_forms(batch: TensorDict) -> dict[str, KeyForm]:
    """The form of every key; ValueError for a key that holds no tensor."""
    forms = {}
    for key in batch.keys():  # noqa: SIM118 (a TensorDict iterates over rows)
        value = batch.get(key)
        if not isinstance(value, torch.Tensor) or is_tensor_collection(value) or isinstance(value, NonTensorData):
            raise ValueError(
                f"outputs must be tensors, key {key!r} holds a {type(value).__name__}: drop it before merging"
            )
        ragged_dim = value._ragged_idx - value.dim() if value.is_nested else 0
        forms[key] = KeyForm(str(value.dtype).removeprefix("torch."), ragged_dim)
    return forms


def to_rows(batch: TensorDict) -> list[Row]:
    """One dict of plain tensors for each sample."""
    columns = {key: list(batch.get(key).unbind()) for key in key_forms(batch)}
    return [{key: column[i] for key, column in columns.items()} for i in range(batch.batch_size[0])]


def from_rows(rows: Sequence[Row], forms: dict[str, KeyForm]) -> TensorDict:
    """The batch again: rows stacked where the key was dense, joined into one jagged tensor where it was ragged."""
    columns = {key: [row[key] for row in rows] for key in forms}
    return TensorDict(
        {key: _join(column, forms[key].ragged_dim) for key, column in columns.items()}, batch_size=[len(rows)]
    )


def _join(tensors: list[torch.Tensor], ragged_dim: int) -> torch.Tensor:
    if ragged_dim == 0:
        return torch.stack(tensors)
    sizes = [tensor.shape[ragged_dim] for tensor in tensors]
    offsets = torch.tensor([0, *sizes], device=tensors[0].device).cumsum(0)
    return torch.nested.nested_tensor_from_jagged(
        torch.cat(tensors, dim=ragged_dim),
        offsets,
        jagged_dim=tensors[0].dim() + 1 + ragged_dim,
        min_seqlen=min(sizes),
        max_seqlen=max(sizes),
    )
