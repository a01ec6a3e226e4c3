"""Build and check the batch that all libraries exchange, a TensorDict of jagged tensors (`seqpack.batches.schema`)."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seqpack.batches.dicts import build, is_tensordict, leaves, size_of
from seqpack.batches.jagged import Ragged, is_jagged, jagged, ragged
from seqpack.batches.schema import MEDIA_KEYS, SAMPLE_KEYS, TOKEN_KEYS
from seqpack.batches.view import BatchView

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = ["check_batch", "jagged", "lengths", "make_batch", "view_batch"]


def make_batch(samples: Sequence[Mapping[str, Any]]) -> "TensorDict":
    """Build the batch of the given samples: one mapping each, all with the same keys, `input_ids` among them.

    Tensors (or lists of numbers, for keys of the schema) of one or more dimensions are per token along their last
    dimension and as long as `input_ids`, but media keys, which are jagged along their first. Numbers and scalar
    tensors become one dense value a sample, everything else (text, messages) stays as it is. Raises ValueError
    naming the sample and key that do not fit.
    """
    if not samples:
        raise ValueError("make_batch needs at least one sample")
    keys = list(samples[0])
    for index, sample in enumerate(samples):
        if set(sample) != set(keys):
            raise ValueError(f"sample {index} and sample 0 disagree on the keys {sorted(set(sample) ^ set(keys))}")
    if "input_ids" not in keys:
        raise ValueError("samples need the key 'input_ids'")
    batch = build({key: _column(key, [sample[key] for sample in samples]) for key in keys}, len(samples))
    check_batch(batch)
    return batch


def lengths(batch: "TensorDict | BatchView") -> list[int]:
    """Return the number of tokens of each sample."""
    if isinstance(batch, BatchView):
        return list(batch.lengths)
    return _input_ids(batch).lengths


def check_batch(batch: "TensorDict | BatchView") -> None:
    """Raise ValueError naming the key that breaks the schema: type, layout, lengths, or a trained first token."""
    view_batch(batch)


def view_batch(batch: "TensorDict | BatchView") -> BatchView:
    """Check the batch as `check_batch` does and return it taken apart, so that nobody need do that twice.

    A view is returned as it is: it was checked when it was made.
    """
    if isinstance(batch, BatchView):
        return batch
    if not is_tensordict(batch):
        raise ValueError(f"a batch is a TensorDict, got {type(batch).__name__}")
    size = size_of(batch)
    ids = _input_ids(batch)
    sizes = ids.lengths
    if len(sizes) != size:
        raise ValueError(f"input_ids holds {len(sizes)} samples, the batch {size}")
    for index, length in enumerate(sizes):
        if length < 1:
            raise ValueError(f"sample {index} of input_ids is empty")
    columns: dict[str, Any] = {}
    for key, value in leaves(batch):
        columns[key] = value if not is_jagged(value) else ids if key == "input_ids" else ragged(value)
        _check_entry(key, columns[key], sizes)
    if "loss_mask" in columns:
        _check_first_tokens(columns["loss_mask"])
    return BatchView(tuple(sizes), columns, ids.values.device)


def _input_ids(batch: "TensorDict") -> Ragged:
    ids = batch.get("input_ids")
    if ids is None:
        raise ValueError("the batch has no key 'input_ids'")
    if not is_jagged(ids):
        raise ValueError(
            "input_ids is not jagged; build the batch with make_batch, or cut a padded one with from_padded"
        )
    return ragged(ids)


def _check_entry(key: str, value: Any, sizes: list[int]) -> None:
    expected = TOKEN_KEYS.get(key) or SAMPLE_KEYS.get(key)
    parts = value if isinstance(value, Ragged) else None
    tensor = value if parts is None else parts.values
    if expected is not None and (not isinstance(tensor, Tensor) or tensor.dtype != expected):
        raise ValueError(f"{key} must be a tensor of {expected}, got {getattr(tensor, 'dtype', type(value).__name__)}")
    if key in TOKEN_KEYS and parts is None:
        raise ValueError(
            f"{key} must be jagged, one value a token; build it with seqpack.batches.batch.jagged, or use from_padded"
        )
    if key in SAMPLE_KEYS and (parts is not None or value.shape != (len(sizes),)):
        found = "a jagged tensor" if parts is not None else tuple(value.shape)
        raise ValueError(f"{key} must have shape ({len(sizes)},), got {found}")
    if parts is None:
        return
    if len(parts.lengths) != len(sizes):
        raise ValueError(f"{key} holds {len(parts.lengths)} samples, input_ids {len(sizes)}")
    if key in MEDIA_KEYS:
        return
    if parts.dim != parts.values.dim() - 1 and key in TOKEN_KEYS:
        raise ValueError(
            f"{key} is ragged along dimension {parts.dim} of a sample, not its last; rebuild it with batch.jagged"
        )
    if key == "position_ids":
        _check_positions(parts.values)
    elif key in TOKEN_KEYS and parts.values.dim() != 1:
        raise ValueError(f"{key} must be (B, j), got samples of {parts.values.dim()} dimensions")
    if parts.lengths != sizes:
        index = next(i for i, (own, length) in enumerate(zip(parts.lengths, sizes, strict=True)) if own != length)
        raise ValueError(f"sample {index} has {parts.lengths[index]} values of {key} for {sizes[index]} input_ids")


def _check_positions(values: Tensor) -> None:
    if values.dim() > 2 or (values.dim() == 2 and values.shape[0] not in (3, 4)):
        raise ValueError(
            f"position_ids must be (B, j), (B, 3, j) or (B, 4, j), got values of shape {tuple(values.shape)}"
        )


def _check_first_tokens(parts: Ragged) -> None:
    first = parts.values[torch.tensor(parts.starts, dtype=torch.int64, device=parts.values.device)]
    trained = first.nonzero().flatten().tolist()
    if trained:
        raise ValueError(f"loss_mask of sample {trained[0]} trains the first token, which nothing comes before")


def _column(key: str, values: list[Any]) -> Any:
    dtype = TOKEN_KEYS.get(key) or SAMPLE_KEYS.get(key)
    if dtype is not None:
        values = [_tensor(key, index, value, dtype) for index, value in enumerate(values)]
    if all(isinstance(value, Tensor) for value in values):
        if key in MEDIA_KEYS or any(value.dim() for value in values):
            return _ragged_column(key, values)
        return torch.stack(values)
    if any(isinstance(value, Tensor) for value in values):
        raise ValueError(f"{key} is a tensor in some samples and not in others")
    if all(isinstance(value, bool | int | float) for value in values):
        return torch.tensor(values)
    return values


def _ragged_column(key: str, values: list[Tensor]) -> Tensor:
    try:
        return jagged(values, 0 if key in MEDIA_KEYS else -1)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _tensor(key: str, index: int, value: Any, dtype: torch.dtype) -> Tensor:
    """Turn a value of a schema key into its type; floats never become integers silently."""
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{key} of sample {index} is not a tensor or a list of numbers: {error}") from error
    if tensor.is_floating_point() and not dtype.is_floating_point and tensor.numel():
        raise ValueError(f"{key} of sample {index} is {tensor.dtype}, expected {dtype}")
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
