"""A rank's micro-batches: rows, wanted tokens, who shares them, and the dummies between them."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from engines.execution.local_batch import LocalBatch
from engines.execution.micro_batches import MicroBatches, dummy_micro_batch
from engines.parallel.planning import PlannedRows
from engines.tiny import tiny_batch
from seqpack import PackedBatch, pack_sequences, view_batch
from seqpack.batches.batch import jagged
from seqpack.batches.jagged import Ragged
from seqpack.batches.view import BatchView

CPU = torch.device("cpu")
PARTS = [PlannedRows((3, 1), (0,)), PlannedRows((), (0,)), PlannedRows((0,), (0, 1))]


def local(batch: TensorDict, rows: Sequence[int]) -> LocalBatch:
    return LocalBatch(view_batch(batch).select(rows), tuple(rows), view_batch(batch).lengths)


def group_of(ranks: tuple[int, ...]) -> Any:
    """What stands for a process group."""
    return f"group of {ranks}"


def same(one: PackedBatch, other: PackedBatch) -> None:
    assert one.values.keys() == other.values.keys()
    assert all(torch.equal(one.values[key], other.values[key]) for key in one.values)
    assert torch.equal(one.cu_seqlens, other.cu_seqlens)


@pytest.mark.parametrize("keys", [None, ("input_ids",), ("input_ids", "loss_mask")])
def test_micro_batches_are_the_rows_packed(keys: tuple[str, ...] | None) -> None:
    batch = tiny_batch([5, 3, 6, 4])
    batch["loss_mask"] = jagged([torch.arange(n) == n - 1 for n in (5, 3, 6, 4)])
    made = MicroBatches(local(batch, [3, 0, 1]), PARTS, group_of, CPU, keys)
    assert len(made) == 3
    assert made.parts == tuple(PARTS)
    for _ in range(2):  # each iteration packs anew
        first, dummy, last = made
        same(first.packed, pack_sequences(batch, [3, 1], keys=keys))
        same(last.packed, pack_sequences(batch, [0], keys=keys))
        assert [one.rows for one in (first, dummy, last)] == [(3, 1), (), (0,)]
        assert [one.dummy for one in (first, dummy, last)] == [False, True, False]
        assert [one.loss_weight for one in (first, dummy, last)] == [1.0, 1.0, 0.5]
        assert [one.group for one in (first, last)] == [group_of((0,)), group_of((0, 1))]
        trained = keys is None or "loss_mask" in keys
        want = torch.tensor([False, True, True, True, False, True, True])
        assert torch.equal(first.wanted, first.packed.values["loss_mask"] if trained else want)
        same(dummy.packed, dummy_micro_batch(made.batch.view, keys))
        assert dummy.wanted.tolist() == [False]
        assert dummy.wanted.dtype == torch.bool


@pytest.mark.parametrize("axes", [0, 3])
def test_a_dummy_is_the_first_token_with_every_key(axes: int) -> None:
    batch = tiny_batch([5, 3])
    shape = (axes,) if axes else ()
    batch["position_ids"] = jagged([torch.arange(n).expand(*shape, n).contiguous() + 4 for n in (5, 3)])
    batch["pixel_values"] = jagged([torch.ones(2, 4), torch.ones(3, 4)], 0)
    batch["reward"] = torch.tensor([1.0, 2.0])
    view = view_batch(batch)
    packed = dummy_micro_batch(view)
    assert (packed.indices, packed.lengths, packed.num_tokens) == ((), (1,), 1)
    assert packed.values.keys() == view.columns.keys()
    assert packed.values["input_ids"].tolist() == [int(batch["input_ids"][0][0])]
    assert packed.values["position_ids"].flatten().tolist() == [4] * max(axes, 1)
    assert packed.values["pixel_values"].shape == (2, 4)  # an image is whole
    assert packed.values["reward"].tolist() == [1.0]
    assert packed.values["loss_mask"].tolist() == [False]
    assert packed.cu_seqlens.tolist() == [0, 1]
    assert set(dummy_micro_batch(view, ("input_ids",)).values) == {"input_ids"}


def test_a_dummy_trains_nothing_whatever_its_row_does() -> None:
    """Also of a view whose mask says otherwise."""
    view = view_batch(tiny_batch([5, 3]))
    mask = view.columns["loss_mask"]
    view.columns["loss_mask"] = mask._replace(values=torch.ones_like(mask.values))
    assert dummy_micro_batch(view).values["loss_mask"].tolist() == [False]


def test_everything_is_on_the_executors_device() -> None:
    """The device "meta" holds shapes alone."""
    meta = torch.device("meta")
    for made in MicroBatches(local(tiny_batch([5, 3, 6, 4]), [3, 0, 1]), PARTS, lambda ranks: None, meta):
        tensors = [made.wanted, made.packed.cu_seqlens, made.packed.positions, *made.packed.values.values()]
        assert {tensor.device for tensor in tensors} == {meta}
    host = view_batch(tiny_batch([5, 3]))
    columns = {
        key: column._replace(values=column.values.to(meta)) if isinstance(column, Ragged) else column.to(meta)
        for key, column in host.columns.items()
    }
    view = BatchView(host.lengths, columns, meta)
    assert {tensor.device for tensor in dummy_micro_batch(view).values.values()} == {meta}
    assert dummy_micro_batch(view).cu_seqlens.device == meta
