"""The edge to tensordict: an optional package, imported where it is used, and refused when it is too old."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor

from seqpack.batches.jagged import flattened, is_jagged, jagged_from_values, jagged_like, ragged, select

if TYPE_CHECKING:
    from tensordict import TensorDict, TensorDictBase

OLDEST = (0, 15)
Columns = TypeVar("Columns", "TensorDict", dict[str, Any])


@dataclass(frozen=True)
class Shared:
    """Metadata of a whole batch (`TensorDict.set_non_tensor`), not of its samples: every part of the batch keeps it."""

    value: Any


def require_tensordict() -> Any:
    """Import and return tensordict 0.15 or newer; ImportError says what to install and why an older one will not do."""
    try:
        import tensordict
    except ModuleNotFoundError as error:
        raise ImportError("batches of several keys need tensordict: pip install 'tensordict>=0.15'") from error
    check_version(str(tensordict.__version__))
    return tensordict


def check_version(version: str) -> None:
    """Raise ImportError for a tensordict that loses the ragged dimension (before 0.15)."""
    major, minor = (int("".join(c for c in part if c.isdigit()) or 0) for part in (version + ".0").split(".")[:2])
    if (major, minor) < OLDEST:
        raise ImportError(
            f"tensordict {version} loses data: it resets the ragged dimension of (B, 3, j) when a batch is indexed, "
            "concatenated, consolidated or pickled. Install tensordict>=0.15"
        )


def is_tensordict(x: object) -> bool:
    """Return whether `x` is a TensorDict (and not one of its non-tensor leaves)."""
    if isinstance(x, Tensor | Sequence) or "tensordict" not in sys.modules:  # without the package there is none
        return False
    tensordict = require_tensordict()
    return isinstance(x, tensordict.TensorDictBase) and not tensordict.is_non_tensor(x)


def size_of(td: "TensorDictBase") -> int:
    """Return the number of samples; ValueError when the TensorDict has no batch dimension."""
    if td.batch_dims != 1:
        raise ValueError(f"expected a TensorDict with batch_size [B], got {list(td.batch_size)}")
    return int(td.batch_size[0])


def leaf(td: "TensorDictBase", key: str) -> Any:
    """Return the value under `key`: a tensor, a TensorDict, a list of per-sample Python values, or `Shared`."""
    value = td.get(key)
    if isinstance(value, Tensor) or is_tensordict(value):
        return value
    return Shared(value.data) if isinstance(value, require_tensordict().NonTensorData) else list(value.tolist())


def leaves(td: "TensorDictBase") -> Iterable[tuple[str, Any]]:
    """Yield (key, value), values as `leaf` returns them."""
    return ((key, leaf(td, key)) for key in td.keys())  # noqa: SIM118 - a TensorDict iterates over its batch


def build(values: Mapping[str, Any], size: int, device: torch.device | None = None) -> "TensorDict":
    """Make a TensorDict with batch_size [size]; lists become per-sample values, kept as they are, `Shared` metadata.

    Its jagged columns share their offsets (`share_offsets`).
    `device` is the one that the TensorDict declares: one that declares none is consolidated on the host, wherever its
    tensors lie.
    """
    tensordict = require_tensordict()
    wrapped = {k: _wrapped(tensordict, v, size) for k, v in share_offsets(dict(values)).items()}
    return tensordict.TensorDict(wrapped, batch_size=[size], device=device)


def share_offsets(columns: Columns, like: Tensor | None = None) -> Columns:
    """Return the columns with one offsets object in all jagged ones of the same lengths: `a - b`, `a * mask` compose.

    torch composes two jagged tensors only where they hold the very same offsets tensor; equal numbers will not do. What
    is built here shares it, and TensorDict keeps that when a batch is indexed, joined, moved, copied or pickled, but
    not in `consolidate`: call this behind it, and where a column was added from elsewhere.

    `columns`: a batch, or a dict of its columns; nested batches share with it. `like`: the jagged column to share
    with, where None `input_ids` or else the first jagged one. Values are not copied, except those with holes. What has
    other lengths (media) or lies on another device stays as it is.
    """
    entries = dict(columns.items())
    if like is None:
        first = next((value for value in entries.values() if is_jagged(value)), None)
        like = entries["input_ids"] if is_jagged(entries.get("input_ids")) else first
    if like is not None and cast("Any", like).lengths() is not None:
        parts = ragged(like)
        like = jagged_from_values(flattened(parts), parts.lengths, parts.dim)
    shared = entries if like is None else {key: _sharing(value, like) for key, value in entries.items()}
    if isinstance(columns, dict):
        return shared
    batch = columns.copy()
    for key, value in shared.items():
        if value is not entries[key]:
            batch.set(key, value)
    return batch


def _sharing(value: Any, like: Tensor) -> Any:
    if is_tensordict(value):
        return share_offsets(value, like)
    if not is_jagged(value) or value.device != like.device:
        return value
    own, other = value.offsets(), cast("Any", like).offsets()
    if own.shape != other.shape or (own is other and value.lengths() is None):
        return value
    parts = ragged(value)
    return jagged_like(flattened(parts), like, parts.dim) if parts.lengths == ragged(like).lengths else value


def take(x: Any, indices: list[int]) -> Any:
    """Return the samples at `indices` of a tensor, a jagged tensor, a list or a TensorDict of them."""
    if isinstance(x, Shared):
        return x
    if isinstance(x, list):
        return [x[i] for i in indices]
    if not isinstance(x, Tensor):
        return build({key: take(value, indices) for key, value in leaves(x)}, len(indices), x.device)
    if x.is_nested:
        return select(x, indices)
    if indices and indices == list(range(indices[0], indices[0] + len(indices))):
        return x.narrow(0, indices[0], len(indices))
    return x.index_select(0, torch.tensor(indices, dtype=torch.int64, device=x.device))


def _wrapped(tensordict: Any, value: Any, size: int) -> Any:
    if isinstance(value, Shared):
        return tensordict.NonTensorData(value.value, batch_size=[size])
    if isinstance(value, list):
        return tensordict.NonTensorStack(*[tensordict.NonTensorData(item) for item in value])
    return value
