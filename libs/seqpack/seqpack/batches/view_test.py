from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from seqpack.batches.batch import lengths, make_batch, view_batch
from seqpack.batches.jagged import jagged, samples_of
from seqpack.batches.operations import index_select
from seqpack.batches.packed import pack_each, pack_sequences, unpack_sequences
from seqpack.batches.view import BatchView, Totals

MASKS = st.lists(st.lists(st.booleans(), min_size=1, max_size=6), min_size=1, max_size=6)


def batch_of(masks: list[list[bool]], groups: list[int] | None = None) -> TensorDict:
    return make_batch(
        [
            {
                "input_ids": torch.arange(len(mask)) + 10 * i,
                "position_ids": torch.arange(3 * len(mask)).view(3, len(mask)) + i,
                "loss_mask": [False, *mask[1:]],
                "reward": float(i),
                "group": 0 if groups is None else groups[i],
                "text": f"sample {i}",
                "pixel_values": torch.full((i % 3, 2), float(i)),
            }
            for i, mask in enumerate(masks)
        ]
    )


@given(masks=MASKS, data=st.data())
def test_totals_count_what_a_loop_counts(masks: list[list[bool]], data: st.DataObject) -> None:
    groups = data.draw(st.lists(st.integers(0, 3), min_size=len(masks), max_size=len(masks)))
    counts = [sum(mask[1:]) for mask in masks]
    used = {group for group, count in zip(groups, counts, strict=True) if count}
    expected = Totals(sum(counts), sum(count > 0 for count in counts), len(used))
    batch = batch_of(masks, groups)
    assert Totals.of(batch) == Totals.of(view_batch(batch)) == expected
    assert expected.answers == expected.sequences
    batch["episode"] = batch["group"]  # episodes of several rows are counted as groups are
    whole = replace(expected, episodes=len(used))
    assert Totals.of(batch) == Totals.of(view_batch(batch)) == whole
    assert whole.answers == len(used)
    del batch["episode"]
    # A first token in the mask is refused by the schema's check and never counted.
    batch["loss_mask"] = jagged([torch.tensor(mask) for mask in masks])
    assert Totals.of(batch) == expected


def test_totals_of_a_mask_that_is_all_true_leave_the_first_token_out() -> None:
    batch = TensorDict({"loss_mask": jagged([torch.ones(3, dtype=torch.bool)])}, batch_size=[1])
    assert Totals.of(batch) == Totals(tokens=2, sequences=1, groups=0)


@given(st.lists(st.lists(st.booleans(), max_size=3), min_size=1, max_size=6))
def test_rows_without_tokens_count_nothing(masks: list[list[bool]]) -> None:
    """A mask alone may have such rows, first, between and last."""
    column = jagged([torch.tensor(mask, dtype=torch.bool) for mask in masks])
    groups = torch.arange(len(masks)) // 2
    counts = [sum(mask[1:]) for mask in masks]
    used = {row // 2 for row, count in enumerate(counts) if count}
    batch = TensorDict({"loss_mask": column, "group": groups, "episode": torch.arange(len(masks))}, [len(masks)])
    answers = sum(count > 0 for count in counts)
    assert Totals.of(batch) == Totals(sum(counts), answers, len(used), answers)


def test_totals_need_a_mask() -> None:
    batch = make_batch([{"input_ids": [1, 2]}])
    for given_batch in (batch, view_batch(batch)):
        with pytest.raises(ValueError, match="no key 'loss_mask'"):
            Totals.of(given_batch)


@given(masks=MASKS, data=st.data())
def test_a_view_is_taken_where_a_batch_is(masks: list[list[bool]], data: st.DataObject) -> None:
    batch = batch_of(masks)
    view = view_batch(batch)
    assert view_batch(view) is view
    assert list(view.lengths) == lengths(view) == lengths(batch)
    rows = data.draw(st.lists(st.integers(0, len(masks) - 1), min_size=1, max_size=6))
    again = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=6))
    chosen, expected = index_select(view, rows), index_select(batch, rows)
    for left, right in [
        (pack_sequences(view, rows, align=2), pack_sequences(batch, rows, align=2)),
        (pack_sequences(chosen, again), pack_sequences(expected, again)),
        (next(pack_each(chosen, [again])), pack_sequences(expected, again)),
    ]:
        assert (left.lengths, left.indices, left.extras) == (right.lengths, right.indices, right.extras)
        assert left.values.keys() == right.values.keys()
        assert all(torch.equal(left.values[key], right.values[key]) for key in left.values)
        assert torch.equal(left.cu_seqlens, right.cu_seqlens)
    assert chosen.totals == Totals.of(expected)
    rebuilt = pack_sequences(chosen.to_batch())
    assert all(torch.equal(rebuilt.values[key], value) for key, value in pack_sequences(expected).values.items())


@given(masks=MASKS, data=st.data())
def test_flat_columns_of_a_selection_agree_token_by_token(masks: list[list[bool]], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(masks) - 1), max_size=6))
    view = view_batch(batch_of(masks)).select(rows)
    samples = [samples_of(batch_of(masks)[key]) for key in ("input_ids", "loss_mask")]
    for key, parts in zip(("input_ids", "loss_mask"), samples, strict=True):
        assert view.flat(key).tolist() == [int(token) for i in rows for token in parts[i]]
    assert torch.equal(view.trained, view.flat("loss_mask"))
    assert view.row_sums(view.trained).tolist() == [sum(masks[i][1:]) for i in rows]
    assert view.row_sums(view.flat("input_ids").double()).tolist() == [float(samples[0][i].sum()) for i in rows]


def test_a_selection_copies_no_token() -> None:
    view = view_batch(batch_of([[True] * 3, [True] * 4, [True] * 2]))
    chosen = view.select([2, 0])
    assert chosen.parts("input_ids").values is view.parts("input_ids").values
    assert view.flat("input_ids") is view.parts("input_ids").values


def test_nested_dicts_are_selected_too() -> None:
    batch = make_batch([{"input_ids": [1, 2]}, {"input_ids": [3]}])
    batch["media"] = TensorDict({"x": torch.tensor([1, 2])}, batch_size=[2])
    assert view_batch(batch).select([1]).columns["media"]["x"].tolist() == [2]


def test_what_comes_back_from_a_packed_view_is_the_batch() -> None:
    batch = batch_of([[True] * 3, [True] * 4])
    back = unpack_sequences(pack_sequences(view_batch(batch)))
    assert set(back.keys()) == set(batch.keys())
    assert len(view_batch(batch)) == 2
    assert set(view_batch(batch).keys()) == set(batch.keys())
    assert "reward" in view_batch(batch)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda view: view.parts("nothing"), "no key 'nothing'; it has input_ids"),
        (lambda view: view.parts("reward"), "reward is not jagged, but Tensor"),
        (lambda view: view.select([2]), r"indices\[0\] = 2 is out of range for 2 samples"),
        (lambda view: view.select(torch.tensor([True, False])), "turn a mask into indices"),
    ],
)
def test_bad_input_is_named(call: Callable[[BatchView], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(view_batch(batch_of([[True, True], [True]])))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.bfloat16, torch.float16, torch.float64])
def test_row_sums_stall_in_no_dtype(dtype: torch.dtype) -> None:
    view = view_batch(make_batch([{"input_ids": torch.zeros(n, dtype=torch.int64)} for n in (4097, 3)]))
    got = view.row_sums(torch.ones(4100, dtype=dtype))
    assert got.tolist() == [4097, 3]
    wide = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}
    assert got.dtype == wide.get(dtype, torch.int64)
