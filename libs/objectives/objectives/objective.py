"""The parts that objectives share. What an objective is, and how its metrics reduce: `seqpack.Objective`."""

import torch
from tensordict import TensorDict
from torch import Tensor

from seqpack.batches.batch import view_batch
from seqpack.batches.packed import PackedBatch
from seqpack.batches.view import BatchView


def trained_mask(batch: PackedBatch) -> Tensor:
    """Return the trained tokens, bool[T]; the first token of a sequence is never trained."""
    mask = batch.values["loss_mask"].to(torch.bool)
    starts = batch.cu_seqlens[:-1].to(torch.int64)
    # One more entry than tokens: an empty last sequence starts after the last one.
    first = mask.new_zeros(mask.numel() + 1).index_fill(0, starts, True)
    return mask & ~first[:-1]


def rows_without_gradient(batch: TensorDict | BatchView, factor: str | None = None) -> Tensor:
    """Return bool[B]: rows without a trained token or, with a key `factor`, without one other than 0 (NaN is other)."""
    view = view_batch(batch)
    counted = view.trained
    if factor is not None:
        counted = counted & (view.flat(factor) != 0)
    return view.row_sums(counted) == 0
