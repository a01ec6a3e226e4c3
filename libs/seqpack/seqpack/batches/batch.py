"""Build and check the batch that all libraries exchange, a TensorDict of jagged tensors (`seqpack.batches.schema`)."""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor

from seqpack.batches.dicts import build, is_tensordict, leaves, size_of
from seqpack.batches.jagged import Ragged, is_jagged, jagged, ragged
from seqpack.batches.layout import parts_of
from seqpack.batches.schema import MEDIA_KEYS, ROUTED_EXPERTS, SAMPLE_KEYS, TOKEN_KEYS
from seqpack.batches.view import BatchView

if TYPE_CHECKING:
    from tensordict import TensorDict

Batch: TypeAlias = "TensorDict | BatchView | dict[str, Any] | Sequence[Mapping[str, Any]]"
"""What is taken for a batch: see `view_batch`."""

__all__ = ["check_batch", "jagged", "lengths", "make_batch", "view_batch"]


def make_batch(samples: Sequence[Mapping[str, Any]]) -> "TensorDict":
    """Build the batch of the given samples: one mapping each, all with the same keys, `input_ids` among them.

    Tensors (or lists of numbers, for keys of the schema) of one or more dimensions are per token along their last
    dimension and as long as `input_ids`; `routed_experts` is so along its first; media keys are jagged along theirs,
    with lengths of their own. Numbers and scalar tensors become one dense value a sample, everything else (text,
    messages) stays as it is. Raise ValueError naming the sample and key that do not fit.
    """
    columns = columns_of(samples)
    batch = build(columns, len(samples))
    check_batch(batch)
    return batch


def columns_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the columns of `make_batch`: jagged and dense tensors, and lists of what is neither."""
    if not samples:
        raise ValueError("make_batch needs at least one sample")
    keys = list(samples[0])
    for index, sample in enumerate(samples):
        if set(sample) != set(keys):
            raise ValueError(f"sample {index} and sample 0 disagree on the keys {sorted(set(sample) ^ set(keys))}")
    if "input_ids" not in keys:
        raise ValueError("samples need the key 'input_ids'")
    return {key: _column(key, [sample[key] for sample in samples]) for key in keys}


def lengths(batch: Batch) -> list[int]:
    """Return the number of tokens of each sample."""
    if isinstance(batch, BatchView):
        return list(batch.lengths)
    return _input_ids(dict(_columns(batch)[0]).get("input_ids")).lengths


def check_batch(batch: Batch) -> None:
    """Raise ValueError naming the key that breaks the schema: type, layout, lengths, or a trained first token."""
    view_batch(batch)


def view_batch(batch: Batch) -> BatchView:
    """Check the batch as `check_batch` does, and return a view of its columns that need not be checked again.

    `batch`: a TensorDict; or, where tensordict is not installed, a sequence of samples as `make_batch` takes them or a
    dict of their columns (jagged tensors, dense ones, lists). A view is returned as it is: it was checked when it was
    made. Per-token tensors that torch labelled ragged along another dimension, as it does where all lengths are equal,
    are laid out by the lengths of `input_ids`.
    """
    if isinstance(batch, BatchView):
        return batch
    entries, size = _columns(batch)
    columns = dict(entries)
    ids = _input_ids(columns.get("input_ids"))
    sizes = ids.lengths
    if size is not None and len(sizes) != size:
        raise ValueError(f"input_ids holds {len(sizes)} samples, the batch {size}")
    for index, length in enumerate(sizes):
        if length < 1:
            raise ValueError(f"sample {index} of input_ids is empty")
    for key, value in columns.items():
        columns[key] = ids if key == "input_ids" else parts_of(key, value, sizes) if is_jagged(value) else value
        _check_entry(key, columns[key], sizes)
    if "loss_mask" in columns:
        _check_first_tokens(columns["loss_mask"])
    return BatchView(tuple(sizes), columns, ids.values.device)


def _columns(batch: Any) -> tuple[Iterable[tuple[str, Any]], int | None]:
    """Return the (key, value) pairs of the batch, and its number of samples where it states one."""
    if is_tensordict(batch):
        return leaves(batch), size_of(batch)
    if isinstance(batch, dict):
        return batch.items(), None
    if isinstance(batch, Sequence) and not isinstance(batch, str) and all(isinstance(s, Mapping) for s in batch):
        return columns_of(batch).items(), len(batch)
    raise ValueError(
        "a batch is a TensorDict, a view of one, a dict of columns or a sequence of samples, "
        f"got {type(batch).__name__}"
    )


def _input_ids(ids: Any) -> Ragged:
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
    if isinstance(value, list) and len(value) != len(sizes):
        raise ValueError(f"{key} has {len(value)} values for {len(sizes)} samples")
    if isinstance(value, Tensor) and key not in SAMPLE_KEYS and value.shape[:1] != (len(sizes),):
        raise ValueError(f"{key} has shape {tuple(value.shape)}, its first dimension must be the {len(sizes)} samples")
    if expected is not None and (not isinstance(tensor, Tensor) or tensor.dtype != expected):
        raise ValueError(f"{key} must be a tensor of {expected}, got {getattr(tensor, 'dtype', type(value).__name__)}")
    if key in TOKEN_KEYS and parts is None:
        raise ValueError(
            f"{key} must be jagged, one value a token; build it with seqpack.batches.batch.jagged, or use from_padded"
        )
    if key in SAMPLE_KEYS and (parts is not None or value.shape != (len(sizes),)):
        kind = "a jagged tensor" if parts is not None else tuple(value.shape)
        raise ValueError(f"{key} must have shape ({len(sizes)},), got {kind}")
    if parts is None:
        return
    if len(parts.lengths) != len(sizes):
        raise ValueError(f"{key} holds {len(parts.lengths)} samples, input_ids {len(sizes)}")
    if key in MEDIA_KEYS:
        if parts.dim:
            raise ValueError(f"{key} is ragged along dimension {parts.dim} of a sample, media are along their first")
        return
    if parts.dim != parts.values.dim() - 1 and key in TOKEN_KEYS:
        raise ValueError(
            f"{key} is ragged along dimension {parts.dim} of a sample, not its last; rebuild it with batch.jagged"
        )
    if key == "position_ids":
        _check_positions(parts.values)
    elif key in TOKEN_KEYS and parts.values.dim() != 1:
        raise ValueError(f"{key} must be (B, j), got samples of {parts.values.dim()} dimensions")
    elif key == ROUTED_EXPERTS:
        _check_experts(tensor, parts.dim)
    if parts.lengths != sizes:
        index = next(i for i, (own, length) in enumerate(zip(parts.lengths, sizes, strict=True)) if own != length)
        raise ValueError(f"sample {index} has {parts.lengths[index]} values of {key} for {sizes[index]} input_ids")


def _check_positions(values: Tensor) -> None:
    if values.dim() > 2 or (values.dim() == 2 and values.shape[0] not in (3, 4)):
        raise ValueError(
            f"position_ids must be (B, j), (B, 3, j) or (B, 4, j), got values of shape {tuple(values.shape)}"
        )


def _check_experts(values: Tensor, dim: int) -> None:
    if values.dtype != torch.int16 or values.dim() != 3 or dim:
        raise ValueError(
            f"{ROUTED_EXPERTS} must be int16 (B, j, layers, k), jagged along a sample's first dimension, got "
            f"{values.dtype} samples of {values.dim()} dimensions, ragged along dimension {dim}"
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
        return jagged(values, 0 if key in MEDIA_KEYS or key == ROUTED_EXPERTS else -1)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def _tensor(key: str, index: int, value: Any, dtype: torch.dtype) -> Tensor:
    """Convert a value of a schema key to its dtype; floats never become integers silently."""
    if isinstance(value, Tensor) and value.dtype == dtype:
        return value
    try:
        tensor = torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{key} of sample {index} is not a tensor or a list of numbers: {error}") from error
    if tensor.is_floating_point() and not dtype.is_floating_point and tensor.numel():
        raise ValueError(f"{key} of sample {index} is {tensor.dtype}, expected {dtype}")
    return tensor if tensor.dtype == dtype else tensor.to(dtype)
