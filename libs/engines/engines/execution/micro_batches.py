"""The micro-batches that an executor is handed: packed when they are asked for, one at a time."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from engines.execution.local_batch import LocalBatch
from engines.parallel.planning import PlannedRows
from seqpack.batches.packed import PackedBatch, pack_each
from seqpack.batches.view import BatchView
from seqpack.memory import ledger


@dataclass(frozen=True)
class MicroBatch:
    """One packed micro-batch of T tokens on the executor's device.

    `rows` are its rows in the global batch; `wanted` bool[T] are the tokens to score (never a sequence's first).
    `ranks` (plan indices) compute it together, in `group` where there are several. A dummy keeps a rank in step with
    the others: one token of a row, of which nothing is wanted or trained, and no rows. `inputs`: what the executor
    made of it ahead of time, where it did (`engines.execution.prefetch`).
    """

    packed: PackedBatch
    rows: tuple[int, ...]
    wanted: Tensor
    ranks: tuple[int, ...]
    group: dist.ProcessGroup | None = None
    inputs: Any = None

    @property
    def dummy(self) -> bool:
        """Whether it is a dummy, of which nothing counts."""
        return not self.rows

    @property
    def loss_weight(self) -> float:
        """This rank's share of its metrics: below 1 where several ranks compute the same loss."""
        return 1.0 / len(self.ranks)


class MicroBatches:
    """A rank's micro-batches of a step, as many on every rank. Each iteration packs them anew, in the plan's order."""

    def __init__(
        self,
        batch: LocalBatch,
        parts: Sequence[PlannedRows],
        group: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
        device: torch.device,
        keys: Sequence[str] | None = None,
    ) -> None:
        """Take the rows and the plan. `keys` are carried (all where None): with `loss_mask` the trained tokens are
        wanted, else all but the first of each row."""
        ledger.record(ledger.BATCH, batch.view.columns)
        self.batch = batch
        self.parts = tuple(parts)
        self.group = group
        self.device = device
        self.keys = keys

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[MicroBatch]:
        rows = [self.batch.places(part.rows) for part in self.parts if part.rows]
        packed = pack_each(self.batch.view, rows, keys=self.keys)
        for part in self.parts:
            one = next(packed) if part.rows else dummy_micro_batch(self.batch.view, self.keys)
            one = one.to(self.device)
            yield MicroBatch(one, part.rows, _wanted(one, bool(part.rows)), part.ranks, self.group(part.ranks))


def dummy_micro_batch(view: BatchView, keys: Sequence[str] | None = None) -> PackedBatch:
    """Pack the first token of the first row, with every key, and train nothing."""
    row = BatchView((1,), view.select([0]).columns, view.device)  # its lengths are those of the keys with tokens
    packed = next(pack_each(row, [(0,)], keys=keys))
    if "loss_mask" in packed.values:
        packed = packed.with_values(loss_mask=torch.zeros_like(packed.values["loss_mask"]))
    return replace(packed, indices=())


def _wanted(packed: PackedBatch, counts: bool) -> Tensor:
    if not counts:
        return torch.zeros(packed.num_tokens, dtype=torch.bool, device=packed.cu_seqlens.device)
    if "loss_mask" in packed.values:
        return packed.values["loss_mask"]
    wanted = packed.token_mask
    wanted[packed.cu_seqlens[:-1].to(torch.int64)] = False
    return wanted
