import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import objectives
import seqpack
from objectives.objective import rows_without_gradient, trained_mask
from objectives.sums import pair
from seqpack import make_batch, pack_sequences, view_batch


def test_one_owner() -> None:
    """E10: the Protocol and the counts are seqpack's."""
    assert objectives.Totals is seqpack.Totals
    assert objectives.Objective is seqpack.Objective


masks = st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6)


@given(masks, st.sampled_from([1, 4]), st.sampled_from([None, 16]))
def test_the_trained_mask_is_the_loss_mask_without_first_tokens(
    rows: list[list[bool]], align: int, bucket: int | None
) -> None:
    batch = make_batch([{"input_ids": [1] * len(row), "loss_mask": [False, *row[1:]]} for row in rows])
    packed = pack_sequences(batch, align=align, bucket=bucket)
    ends = packed.cu_seqlens.tolist()
    raw = torch.ones_like(packed.values["loss_mask"])
    got = trained_mask(packed.with_values(loss_mask=raw)).tolist()
    assert got == [t not in ends for t in range(packed.num_tokens)]
    assert torch.equal(trained_mask(packed), packed.values["loss_mask"])


def test_an_empty_last_sequence_starts_nowhere() -> None:
    packed = pack_sequences(make_batch([{"input_ids": [1, 2], "loss_mask": [False, True]}]))
    packed = replace(packed, cu_seqlens=torch.tensor([0, 2, 2], dtype=torch.int32))
    assert trained_mask(packed).tolist() == [False, True]


@given(masks, st.data())
def test_rows_without_gradient(rows: list[list[bool]], data: st.DataObject) -> None:
    advantages = [
        data.draw(st.lists(st.sampled_from([0.0, 0.0, -0.0, 1.0, math.nan]), min_size=len(row), max_size=len(row)))
        for row in rows
    ]
    batch = make_batch(
        [
            {"input_ids": [1] * len(row), "loss_mask": [False, *row[1:]], "advantages": values}
            for row, values in zip(rows, advantages, strict=True)
        ]
    )
    trained = [[t for t in range(1, len(row)) if row[t]] for row in rows]
    for given_batch in (batch, view_batch(batch)):
        got = rows_without_gradient(given_batch)
        assert got.tolist() == [not row for row in trained]
        got = rows_without_gradient(given_batch, "advantages")
        assert got.tolist() == [all(a[t] == 0 for t in row) for row, a in zip(trained, advantages, strict=True)]
        assert got.dtype == torch.bool


def test_pair_is_sum_and_count() -> None:
    values = torch.tensor([1.0, math.nan, 2.5], dtype=torch.float64, requires_grad=True)
    got = pair(values, torch.tensor([True, False, True]))
    assert got.tolist() == pytest.approx([3.5, 2.0])
    assert got.dtype == torch.float64
    assert not got.requires_grad
