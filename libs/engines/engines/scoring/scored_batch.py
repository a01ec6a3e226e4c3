"""Scores of micro-batches in the rows of the batch that they came from."""

import torch
from tensordict import TensorDict
from torch import Tensor

from engines.execution.local_batch import LocalBatch
from engines.execution.micro_batches import MicroBatch
from seqpack.batches.dicts import share_offsets
from seqpack.batches.jagged import jagged_from_values


def tokens_of(micro_batch: MicroBatch, starts: Tensor) -> Tensor:
    """Return i64[T], the places of a micro-batch's tokens among those of the whole batch."""
    packed = micro_batch.packed
    cu_seqlens = packed.cu_seqlens.to(torch.int64)
    rows = torch.tensor(micro_batch.rows, device=starts.device)
    shift = starts[rows] - cu_seqlens[:-1]
    return torch.repeat_interleave(shift, cu_seqlens.diff()) + torch.arange(packed.num_tokens, device=starts.device)


def scored_batch(flat: Tensor, batch: LocalBatch, starts: Tensor, like: Tensor | None) -> TensorDict:
    """Return the rows that are held, from flat scores f32[k, tokens of the whole batch]; they compose with `like`."""
    lengths = batch.view.lengths
    if batch.rows != tuple(range(len(batch.lengths))):
        rows, sizes = torch.tensor(batch.rows, device=flat.device), torch.tensor(lengths, device=flat.device)
        ends = sizes.cumsum(0)
        index = torch.repeat_interleave(starts[rows] - ends + sizes, sizes)
        flat = flat[:, index + torch.arange(sum(lengths), device=flat.device)]
    flat = flat.to(batch.view.device)
    columns = {k: jagged_from_values(x, lengths) for k, x in zip(("log_probs", "entropy"), flat, strict=False)}
    return TensorDict(share_offsets(columns, like), batch_size=[len(lengths)])
