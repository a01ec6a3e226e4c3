"""One rank's part of a packed batch, and the whole stream again."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict

from dyncp.comm.collectives import all_gather
from dyncp.planning.sizes import Layout, local_tokens, sequence_align
from dyncp.sharding.layout import Sharding
from seqpack.batches.batch import view_batch
from seqpack.batches.jagged import Ragged
from seqpack.batches.packed import PackedBatch, pack_sequences
from seqpack.batches.schema import MEDIA_KEYS
from seqpack.batches.view import BatchView


@dataclass(frozen=True)
class Shard:
    """The tokens of a packed batch that lie on one rank.

    values: per-token tensors cut to the local tokens (the token dimension keeps its place), per-sample tensors whole.
    position_ids: i64[local tokens], positions in each sequence, not in the shard. index: i64[local tokens], the place
    of each token in the stream. sharding: what `dyncp.attention` and `dyncp.gated_delta_rule` take as cu_seqlens.
    """

    values: dict[str, torch.Tensor]
    position_ids: torch.Tensor
    index: torch.Tensor
    sharding: Sharding
    rank: int


def pack_group(
    batch: TensorDict | BatchView,
    sample_ids: Sequence[int],
    cp_size: int,
    layout: Layout = "contiguous",
    align: int = 1,
) -> PackedBatch:
    """Pack the samples of one group so that its stream shards evenly; without samples, the smallest dummy.

    align: the plan's (`plan(..., align=...)` counts this padding under the cap). Padding is `local_tokens`'s. A dummy
    works for every batch that its samples work for: one token of a sample, untrained (loss_mask False), the sample's
    own reward, text and the like, and no media: the token is not an image's where `mm_token_type_ids` tell them apart.
    """
    view = view_batch(batch)
    chosen = list(sample_ids)
    if not chosen:
        view, chosen = _dummy(view), [0]
    each = sequence_align(cp_size, layout)
    total = local_tokens([view.lengths[i] for i in chosen], cp_size, layout, align) * cp_size
    return pack_sequences(view, chosen, align=each, bucket=[total])


def _dummy(view: BatchView) -> BatchView:
    """Return the view of one sample of one token."""
    sample, place = _text_token(view)
    one = view.select([sample])
    columns: dict[str, Any] = {}
    for key, column in one.columns.items():
        if not isinstance(column, Ragged):
            columns[key] = column
        elif key in MEDIA_KEYS:
            columns[key] = column._replace(lengths=[0])
        else:
            columns[key] = column._replace(starts=[column.starts[0] + place], lengths=[1])
    ids = columns["input_ids"]
    untrained = torch.zeros_like(ids.values, dtype=torch.bool)
    return BatchView((1,), columns | {"loss_mask": ids._replace(values=untrained)}, view.device)


def _text_token(view: BatchView) -> tuple[int, int]:
    """Return (sample, index) of a text token: the first whose type is 0, or the very first without types.

    ValueError where every token stands for media.
    """
    if "mm_token_type_ids" not in view:
        return 0, 0
    types = view.flat("mm_token_type_ids")
    text = (types == 0).nonzero().flatten()
    if not len(text):
        raise ValueError("every token of the batch stands for an image or a video: a dummy needs one of text")
    first = int(text[0])
    for sample, length in enumerate(view.lengths):
        if first < length:
            return sample, first
        first -= length
    raise AssertionError("the token lies in one of the samples")


def shard(packed: PackedBatch, cp_rank: int, cp_size: int, layout: Layout = "contiguous") -> Shard:
    """Return the shard of the packed batch on rank cp_rank of cp_size. ValueError where it was not packed for that."""
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in 0..{cp_size - 1}, got {cp_rank}")
    sharding = Sharding(packed.geometry.cu_seqlens, cp_size, layout)
    index = torch.as_tensor(sharding.stream_index(cp_rank), device=packed.positions.device)
    values = {
        key: value.index_select(packed.token_dims[key], index) if key in packed.token_dims else value
        for key, value in packed.values.items()
    }
    return Shard(values, packed.positions[index], index, sharding, cp_rank)


def unshard(
    x: torch.Tensor | Sequence[torch.Tensor], sharding: Sharding, group: dist.ProcessGroup | None = None, dim: int = 0
) -> torch.Tensor:
    """Return the whole stream, tokens in order along `dim`, padding included (`seqpack.unpack_tokens` strips it).

    x: this rank's tensor, gathered over `group` (collective, differentiable); or the tensors of all ranks, joined here.
    """
    if isinstance(x, torch.Tensor):
        local = x.movedim(dim, 0)
        stream = local if group is None or sharding.cp_size == 1 else all_gather(local, group)
    else:
        stream = torch.cat([piece.movedim(dim, 0) for piece in x])
    if stream.shape[0] != sharding.total:
        raise ValueError(
            f"{sharding.cp_size} shards of {sharding.local_tokens} tokens make {sharding.total}; got {stream.shape[0]}"
        )
    order = sharding.gathered_order
    return (stream if order is None else stream[torch.as_tensor(order, device=stream.device)]).movedim(0, dim)
