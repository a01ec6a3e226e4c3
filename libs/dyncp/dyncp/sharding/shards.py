"""One rank's part of a packed batch, and the whole stream again."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tensordict import TensorDict

from dyncp.comm.collectives import all_gather
from dyncp.planning.sizes import Layout, ceil_div, sequence_align
from dyncp.sharding.layout import Sharding
from dyncp.sharding.rows import KeyForm, from_rows, key_forms, to_rows
from seqpack.batches.packed import PackedBatch, pack_sequences


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
    batch: TensorDict,
    sample_ids: Sequence[int],
    cp_size: int,
    layout: Layout = "contiguous",
    bucket: int = 1,
) -> PackedBatch:
    """Pack the samples of one group so that its stream shards evenly; without samples, the smallest dummy.

    bucket: each rank's tokens are rounded up to a multiple of it (kernels tuned for few shapes). A dummy is one token
    of the first sample, untrained (loss_mask False).
    """
    align = sequence_align(cp_size, layout)
    if not sample_ids:
        batch, sample_ids = _dummy(batch), [0]
    packed = pack_sequences(batch, list(sample_ids), align=align)
    per_rank = ceil_div(ceil_div(packed.num_tokens, cp_size), bucket) * bucket
    total = ceil_div(per_rank * cp_size, align) * align
    return (
        packed if total == packed.num_tokens else pack_sequences(batch, list(sample_ids), align=align, bucket=[total])
    )


def _dummy(batch: TensorDict) -> TensorDict:
    forms = key_forms(batch)
    row = to_rows(batch)[0]
    length = row["input_ids"].shape[-1]
    short = {
        key: value.narrow(-1, 0, 1) if forms[key].ragged_dim is not None and value.shape[-1] == length else value
        for key, value in row.items()
    }
    short["loss_mask"] = torch.zeros_like(short["input_ids"], dtype=torch.bool)
    return from_rows([short], forms | {"loss_mask": KeyForm("bool", 0)})


def shard(packed: PackedBatch, cp_rank: int, cp_size: int, layout: Layout = "contiguous") -> Shard:
    """The part of the packed batch that rank cp_rank of cp_size holds. ValueError where it was not packed for that."""
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
    """The whole stream, tokens in order along `dim`, padding included (`seqpack.unpack_tokens` strips it).

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
