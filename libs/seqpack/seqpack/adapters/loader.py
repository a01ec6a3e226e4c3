"""A DataLoader of packed rows, from a map dataset."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.utils.data import DataLoader, Dataset

from seqpack.adapters.collator import PackedCollator
from seqpack.adapters.sampler import PackedBatchSampler


class PackedDataLoader(DataLoader[Any]):
    """A DataLoader with `set_epoch`, which trainers call; a plain one does not pass it to its batch sampler."""

    batch_sampler: PackedBatchSampler

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, by which the order is drawn."""
        self.batch_sampler.set_epoch(epoch)


def packed_dataloader(
    dataset: "Dataset[Any] | Sequence[Any]",
    max_tokens: int,
    *,
    collator: Callable[[list[Any]], Any] | None = None,
    lengths: Sequence[int] | None = None,
    rank: int = 0,
    world_size: int = 1,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> PackedDataLoader:
    """Return a loader of packed rows of at most `max_tokens` for this rank, the same number on every rank.

    `dataset`: samples as `PackedCollator` takes them, by index. `lengths`: their tokens; without it every sample is
    read once (pass a dataset's `length` column where it has one). `collator`: PackedCollator() when None; its `align`
    and `bucket` count in the plan. For a transformers Trainer, return it from an overridden `get_train_dataloader`,
    with rank `args.process_index` of `args.world_size`: it is sharded already, so do not prepare it.
    """
    rows = PackedCollator() if collator is None else collator
    if lengths is None:
        size = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare it
        lengths = [len(dataset[index]["input_ids"]) for index in range(size)]
    sampler = PackedBatchSampler(
        lengths,
        max_tokens,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        align=getattr(rows, "align", 1),
        bucket=getattr(rows, "bucket", None),
    )
    return PackedDataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=rows,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )
