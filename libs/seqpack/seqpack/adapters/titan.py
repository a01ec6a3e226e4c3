"""Packed rows as torchtitan's trainers take them: an iterable of `({"input": ids, "positions": ...}, labels)`.

The shape is that of torchtitan 0.3.0, which no test installs. Run by hand with it (2026-11-26): its
`ParallelAwareDataloader` gave these rows with 0 and 2 workers on 1 and 2 ranks and resumed in their middle exactly, and
its `create_varlen_metadata_for_document` found each sequence and pad. Its trainer was read, not run.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from seqpack.adapters.arguments import IGNORED
from seqpack.adapters.collator import PackedCollator
from seqpack.adapters.stream import PackedStream


class TitanRows(IterableDataset[tuple[dict[str, Tensor], Tensor]]):
    """Rows of one fixed length, with labels shifted: entry t of `labels` is the token after t in the same sequence.

    `stream`: the packer, whose `max_tokens` is the model's `seq_len`; rows are padded to it with `pad_token_id`. Each
    item is `({"input": i64[seq_len], "positions": i64[seq_len]}, labels i64[seq_len])`, where positions begin again
    with each sequence (what the trainer's block-diagonal mask is made from) and labels are -100 at each sequence's last
    token, where the sample does not train, and in the padding. Batches of several rows are the DataLoader's business.
    `state_dict` and `load_state_dict` are the stream's, as torchtitan's checkpointer asks for them.
    """

    def __init__(self, stream: PackedStream, pad_token_id: int = 0, ignore: tuple[str, ...] = ()) -> None:
        super().__init__()
        if stream.bucket is not None:
            raise ValueError("rows of a fixed length have no buckets: leave the stream's bucket out")
        if stream.max_tokens % stream.align:
            raise ValueError(f"max_tokens={stream.max_tokens} is not a multiple of align={stream.align}")
        self.stream = stream
        self.collator = PackedCollator(pad_token_id, stream.align, (stream.max_tokens,), ignore=ignore)

    def __iter__(self) -> Iterator[tuple[dict[str, Tensor], Tensor]]:
        """Yield the rows of the stream."""
        for samples in self.stream:
            packed = self.collator.pack(samples)
            labels = torch.full((packed.num_tokens,), IGNORED, dtype=torch.int64)
            labels[:-1] = packed.values["labels"][1:]  # -100 at a first token, so none crosses a boundary
            yield {"input": packed.values["input_ids"], "positions": packed.position_ids}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the stream."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from the state in the next iteration."""
        self.stream.load_state_dict(state)
