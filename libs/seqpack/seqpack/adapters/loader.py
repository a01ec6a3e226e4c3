"""A DataLoader of packed rows, from a map dataset."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch.utils.data import DataLoader, Dataset

from seqpack.adapters.collator import PackedCollator
from seqpack.adapters.sampler import PackedBatchSampler
from seqpack.planning.padding import usable_capacity


class PackedDataLoader(DataLoader[Any]):
    """A DataLoader with `set_epoch`, which trainers call; a plain one does not pass it to its batch sampler."""

    batch_sampler: PackedBatchSampler
    truncated: int = 0
    """Number of samples that are cut to fit a row; `batch_sampler.dropped` says how many are left out."""

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
    overlong: Literal["error", "drop", "truncate"] = "error",
    empty: Literal["error", "drop"] = "error",
) -> PackedDataLoader:
    """Return a loader of packed rows of at most `max_tokens` for this rank, the same number on every rank.

    `dataset`: samples as `PackedCollator` takes them, by index. `lengths`: their tokens; without it every sample is
    read once (pass a dataset's `length` column where it has one). `collator`: PackedCollator() when None; its `align`
    and `bucket` count in the plan. Samples over the cap are an error, left out or cut (`overlong`), samples without
    tokens an error or left out (`empty`). For a transformers Trainer, return it from an overridden
    `get_train_dataloader`, with rank `args.process_index` of `args.world_size`: it is sharded already, so do not
    prepare it.
    """
    rows = PackedCollator() if collator is None else collator
    if lengths is None:
        size = len(dataset)  # type: ignore[arg-type]  # torch's Dataset does not declare it
        lengths = [len(dataset[index]["input_ids"]) for index in range(size)]
    align, bucket = getattr(rows, "align", 1), getattr(rows, "bucket", None)
    truncated = 0
    if overlong == "truncate":
        if not isinstance(rows, PackedCollator):
            raise ValueError('overlong="truncate" is the work of a PackedCollator: cut the samples, or use "drop"')
        longest = usable_capacity(max_tokens, align, bucket) // align * align
        truncated = sum(length > longest for length in lengths)
        lengths = [min(length, longest) for length in lengths]
        rows, overlong = replace(rows, max_length=longest), "error"
    sampler = PackedBatchSampler(
        lengths,
        max_tokens,
        rank=rank,
        world_size=world_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        align=align,
        bucket=bucket,
        overlong=overlong,
        empty=empty,
    )
    loader = PackedDataLoader(
        dataset,  # type: ignore[arg-type]
        batch_sampler=sampler,
        collate_fn=rows,
        num_workers=num_workers,
        pin_memory=pin_memory,
    )
    loader.truncated = truncated
    return loader
