"""A packed row as arguments of other packages: flash arguments, `seq_idx`, megatron-core's PackedSeqParams."""

from typing import Any

import torch
from torch import Tensor

from seqpack.batches.packed import PackedBatch

IGNORED = -100
"""The label that a cross entropy leaves out, as torch and transformers have it."""


def flash_arguments(packed: PackedBatch) -> dict[str, Any]:
    """Return transformers' flash arguments of a row, for q and k: boundaries i32[n+1], and the longest length.

    A trailing bucket pad is a sequence of its own, and alignment padding belongs to its sequence: all T tokens lie
    between two boundaries.
    """
    bounds, longest = packed.cu_seqlens, packed.max_seqlen
    return {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": longest, "max_length_k": longest}


def sequence_index(packed: PackedBatch) -> Tensor:
    """Return `seq_idx` i32[T], as causal_conv1d and mamba take it: the index of each token's sequence in the row."""
    sizes = torch.tensor(packed.geometry.cu_seqlens, dtype=torch.int64).diff()
    numbers = torch.repeat_interleave(torch.arange(len(sizes), dtype=torch.int32), sizes)
    return numbers.to(packed.cu_seqlens.device)


def packed_seq_arguments(packed: PackedBatch) -> dict[str, Any]:
    """Return the fields of megatron-core's `PackedSeqParams(**fields)` for a row.

    `cu_seqlens_q` counts true tokens and `cu_seqlens_q_padded` the places in the row, which differ where sequences are
    aligned (see `seqpack.alignment`). A trailing bucket pad counts as a sequence without padding, so that both have the
    same number of boundaries. Nothing of Megatron is imported.
    """
    geometry = packed.geometry
    true = [*geometry.lengths, geometry.padding] if geometry.padding else list(geometry.lengths)
    bounds = torch.tensor([0, *true], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(packed.cu_seqlens.device)
    return {
        "qkv_format": "thd",
        "cu_seqlens_q": bounds,
        "cu_seqlens_kv": bounds,
        "cu_seqlens_q_padded": packed.cu_seqlens,
        "cu_seqlens_kv_padded": packed.cu_seqlens,
        "max_seqlen_q": packed.max_seqlen,
        "max_seqlen_kv": packed.max_seqlen,
    }
