"""Batch sampler, collator and loader: every sample once an epoch, hard caps, equal ranks, resuming, exact rows."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from seqpack.adapters import (
    IGNORED,
    PackedBatchSampler,
    PackedCollator,
    packed_dataloader,
    packed_seq_arguments,
)
from seqpack.planning.padding import packed_geometry

LENGTHS = [5, 3, 9, 1, 12, 7, 2, 2, 8, 4, 6, 11, 3]


def samples_of(lengths: list[int], start: int = 10) -> list[dict[str, Any]]:
    return [{"input_ids": list(range(start * i, start * i + n)), "length": n} for i, n in enumerate(lengths)]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=8, max_size=60),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.sampled_from([8, 20, 1000]),
    st.sampled_from([(1, None), (4, None), (2, 16)]),
    st.booleans(),
)
def test_an_epoch_gives_every_sample_under_the_cap(
    lengths: list[int],
    world: int,
    shuffle: bool,
    drop_last: bool,
    window: int,
    padding: tuple[int, int | None],
    quadratic: bool,
) -> None:
    align, bucket = padding
    options: dict[str, Any] = {
        "shuffle": shuffle,
        "drop_last": drop_last,
        "window": window,
        "align": align,
        "bucket": bucket,
    }
    options["cost"] = (lambda n: n * n) if quadratic else None
    ranks = [PackedBatchSampler(lengths, 48, rank=r, world_size=world, seed=3, **options) for r in range(world)]
    epochs = []
    for epoch in range(2):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        rows = [list(sampler) for sampler in ranks]
        assert {len(own) for own in rows} == {len(ranks[0])}
        given_rows = [row for own in rows for row in own]
        assert all(row for row in given_rows)
        assert all(packed_geometry([lengths[i] for i in row], align, bucket).total <= 48 for row in given_rows)
        given_samples = [i for row in given_rows for i in row]
        assert len(set(given_samples)) == len(lengths) - ranks[0].dropped
        assert len(given_samples) == len(set(given_samples)) + ranks[0].repeated
        assert ranks[0].repeated == 0 if drop_last else ranks[0].dropped == 0
        epochs.append(rows)
    if not shuffle:
        assert epochs[0] == epochs[1]


def test_an_epoch_has_an_order_of_its_own_and_the_same_on_every_machine() -> None:
    first, second = PackedBatchSampler(LENGTHS, 16), PackedBatchSampler(LENGTHS, 16)
    orders = []
    for epoch in range(3):
        first.set_epoch(epoch)
        second.set_epoch(epoch)
        orders.append(list(first))
        assert orders[-1] == list(second)
    assert orders[0] != orders[1] != orders[2]
    in_order = list(PackedBatchSampler(LENGTHS, 16, shuffle=False, window=4))
    firsts = [min(row) // 4 for row in in_order]
    assert firsts == sorted(firsts)


def test_no_two_epochs_of_any_seeds_are_alike() -> None:
    """Seed 0 in epoch 1 is not seed 1 in epoch 0: neither by what the rows hold nor by the order of the rows."""

    def epochs(lengths: Sequence[int], **options: Any) -> list[list[list[int]]]:
        found = []
        for seed in range(3):
            sampler = PackedBatchSampler(lengths, 16, seed=seed, **options)
            for epoch in range(3):
                sampler.set_epoch(epoch)
                found.append([sorted(row) for row in sampler])
        return found

    contents = [sorted(rows) for rows in epochs(range(3, 16), window=4)]
    orders = epochs(range(9, 17))  # no two fit into a row
    assert all(sorted(rows) == [[i] for i in range(8)] for rows in orders)
    for drawn in (contents, orders):
        assert not any(left == right for left, right in combinations(drawn, 2))


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_a_state_goes_on_in_the_middle_of_an_epoch(rows: int) -> None:
    sampler = PackedBatchSampler(LENGTHS, 16, world_size=2, rank=1)
    sampler.set_epoch(4)
    whole = list(sampler)
    given_rows = iter(sampler)
    for _ in range(rows):
        next(given_rows)
    state = sampler.state_dict()
    assert state == sampler.state_dict(rows)
    later = PackedBatchSampler(LENGTHS, 16, world_size=2, rank=1)
    later.load_state_dict(state)
    later.set_epoch(4)  # as trainers do before they resume
    assert list(later) == whole[rows:]
    assert list(later) == whole, "the place holds once"
    other = PackedBatchSampler([*LENGTHS[:-1], 4], 16, world_size=2, rank=1)
    with pytest.raises(ValueError, match="other samples, ranks or settings"):
        other.load_state_dict(state)


def test_a_row_in_full() -> None:
    """Written by hand: two sequences and a bucket pad."""
    row = PackedCollator(pad_token_id=9, bucket=8)(
        [{"input_ids": [1, 2, 3], "labels": [1, -100, 3]}, {"input_ids": [4, 5], "length": 2}]
    )
    assert row["input_ids"].tolist() == [[1, 2, 3, 4, 5, 9, 9, 9]]
    assert row["labels"].tolist() == [[-100, -100, 3, -100, 5, -100, -100, -100]]
    assert row["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]
    assert row["seq_idx"].tolist() == [[0, 0, 0, 1, 1, 2, 2, 2]]
    assert row["cu_seq_lens_q"].tolist() == row["cu_seq_lens_k"].tolist() == [0, 3, 5, 8]
    assert row["max_length_q"] == row["max_length_k"] == 3
    assert (row["seq_idx"].dtype, row["cu_seq_lens_q"].dtype) == (torch.int32, torch.int32)
    assert (row["input_ids"].dtype, row["labels"].dtype) == (torch.int64, torch.int64)
    plain = PackedCollator(seq_idx=False, flash=False)([{"input_ids": [1, 2]}])
    assert set(plain) == {"input_ids", "labels", "position_ids"}


def test_masks_choose_what_is_trained() -> None:
    ids = [1, 2, 3, 4]
    collator = PackedCollator()
    for name in ("loss_mask", "assistant_masks", "completion_mask"):
        assert collator([{"input_ids": ids, name: [1, 0, 1, 1]}])["labels"].tolist() == [[-100, -100, 3, 4]]
    both = {"input_ids": ids, "assistant_masks": [0, 1, 1, 0], "completion_mask": [0, 0, 1, 1]}
    assert collator([both])["labels"].tolist() == [[-100, -100, 3, -100]]
    ignoring = PackedCollator(ignore=("completion_mask", "text"))
    assert ignoring([{**both, "text": "x"}])["labels"].tolist() == [[-100, 2, 3, -100]]
    axes = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2], [0, 1, 1, 3]])
    row = collator([{"input_ids": ids, "position_ids": axes}] * 2)
    assert torch.equal(row["position_ids"], torch.cat([axes, axes], 1)[:, None])


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        ({"labels": [1]}, "has no input_ids"),
        ({"input_ids": []}, "one or more tokens"),
        ({"input_ids": [1.5]}, "whole numbers"),
        ({"input_ids": [[1, 2]]}, "one or more tokens"),
        ({"input_ids": [1, 2], "labels": [1]}, "labels of sample 1"),
        ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask of sample 1"),
        ({"input_ids": [1, 2], "attention_mask": [1, 0]}, "padded"),
        ({"input_ids": [1, 2], "text": "x"}, "'text'.*ignore"),
        ({"input_ids": None}, "sample 1 has no input_ids"),
        ([1, 2], "sample 1 has no input_ids, only list"),
        ({"input_ids": "ab"}, "input_ids of sample 1 is no list of numbers"),
        ({"input_ids": [1, None]}, "input_ids of sample 1 is no list of numbers"),
        ({"input_ids": [1, 2], "loss_mask": [None, 1]}, "loss_mask of sample 1 is no list of numbers"),
    ],
)
def test_what_cannot_be_packed_is_named(sample: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PackedCollator()([{"input_ids": [1, 2]}, sample])


@pytest.mark.parametrize("key", ["labels", "loss_mask", "attention_mask", "position_ids"])
def test_a_column_of_none_is_no_column(key: str) -> None:
    plain, row = PackedCollator()([{"input_ids": [1, 2]}] * 2), PackedCollator()([{"input_ids": [1, 2], key: None}] * 2)
    assert {name: str(value) for name, value in row.items()} == {name: str(value) for name, value in plain.items()}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fingerprint": None}, "'fingerprint' of a state of PackedBatchSampler is None"),
        ({"rows": None}, "'rows' of a state"),
        ({"rows": -1}, "'rows' of a state of PackedBatchSampler is -1"),
        ({"rows": True}, "'rows' of a state"),
        ({"epoch": None}, "'epoch' of a state"),
        ({"epoch": -1}, "'epoch' of a state"),
        ({"rows": 99}, "after row 99 of an epoch of 5 rows"),
    ],
)
def test_a_state_that_no_sampler_gave_is_refused(change: dict[str, Any], message: str) -> None:
    sampler = PackedBatchSampler(LENGTHS, 16)
    whole = list(sampler)
    state = {key: value for key, value in {**sampler.state_dict(), **change}.items() if value is not None}
    with pytest.raises(ValueError, match=message):
        sampler.load_state_dict(state)
    assert list(sampler) == whole, "a refused state changes nothing"


def test_refusals() -> None:
    with pytest.raises(ValueError, match="lengths"):
        PackedBatchSampler([4, 17], 16)
    with pytest.raises(ValueError, match="rank must be in"):
        PackedBatchSampler(LENGTHS, 16, rank=2, world_size=2)
    with pytest.raises(ValueError, match="too few for 14 ranks"):
        PackedBatchSampler(LENGTHS, 16, world_size=14)
    with pytest.raises(ValueError, match="window=1"):
        PackedBatchSampler(LENGTHS, 16, world_size=2, window=1)
    with pytest.raises(ValueError, match="rows must be in"):
        PackedBatchSampler(LENGTHS, 16).state_dict(99)
    with pytest.raises(ValueError, match="cost has 2 numbers for 13 samples"):
        PackedBatchSampler(LENGTHS, 16, cost=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"cost\[1\] must be finite"):
        PackedBatchSampler([3, 4], 16, cost=[1.0, -2.0])
    with pytest.raises(ValueError, match="align"):
        PackedCollator(align=0)
    with pytest.raises(ValueError, match="a row is made of"):
        PackedCollator(ignore=("labels",))
    with pytest.raises(ValueError, match="no samples"):
        PackedCollator()([])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_gives_the_rows_of_its_rank(workers: int) -> None:
    samples = samples_of(LENGTHS)
    loaders = [
        packed_dataloader(samples, 16, rank=rank, world_size=2, num_workers=workers, collator=PackedCollator(align=2))
        for rank in range(2)
    ]
    seen = []
    for epoch in range(2):
        rows = []
        for loader in loaders:
            loader.set_epoch(epoch)
            assert len(loader) == len(loaders[0])
            rows += [row["input_ids"][0, : row["cu_seq_lens_q"][-1]] for row in loader]
        tokens = torch.cat(rows)
        assert all(len(row) <= 16 for row in rows)
        assert set(tokens.tolist()) >= {t for sample in samples for t in sample["input_ids"]}
        seen.append(tokens.tolist())
    assert seen[0] != seen[1]


def test_the_fields_of_megatrons_class() -> None:
    packed = PackedCollator(align=4, bucket=16).pack([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5, 6, 7, 8]}])
    fields = packed_seq_arguments(packed)
    assert fields["cu_seqlens_q"].tolist() == fields["cu_seqlens_kv"].tolist() == [0, 3, 8, 12]
    assert fields["cu_seqlens_q_padded"].tolist() == fields["cu_seqlens_kv_padded"].tolist() == [0, 4, 12, 16]
    assert (fields["max_seqlen_q"], fields["max_seqlen_kv"], fields["qkv_format"]) == (8, 8, "thd")
    assert fields["cu_seqlens_q"].dtype == torch.int32
    assert (packed.values["labels"] == IGNORED).sum() == 16 - 6


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("longest", "cap", "window"), [(60, 128, 60), (128, 128, 60), (20, 128, 20), (128, 130, 20)])
def test_every_epoch_has_as_many_rows_as_the_sampler_says(drop_last: bool, longest: int, cap: int, window: int) -> None:
    """As trainers take it: asked once, before the first epoch, and again in a resumed run."""
    lengths = torch.randint(1 + longest // 3, longest + 1, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    options: dict[str, Any] = {"world_size": 3, "window": window, "drop_last": drop_last}
    ranks = [PackedBatchSampler(lengths, cap, rank=rank, **options) for rank in range(3)]
    rows, drawn = len(ranks[0]), set()
    for epoch in range(8):
        for sampler in ranks:
            sampler.set_epoch(epoch)
        own = [list(sampler) for sampler in ranks]
        assert [len(given_rows) for given_rows in own] == [rows] * 3 == [len(sampler) for sampler in ranks]
        samples = [i for given_rows in own for row in given_rows for i in row]
        assert all(0 < sum(lengths[i] for i in row) <= cap for given_rows in own for row in given_rows)
        assert len(set(samples)) == 500 - ranks[0].dropped == len(samples) - ranks[0].repeated
        assert ranks[0].dropped <= (10 if drop_last else 0)
        assert ranks[0].repeated <= 2  # a step that the last samples do not fill
        drawn.add(len(ranks[0]._drawn(epoch)))
        resumed = PackedBatchSampler(lengths, cap, rank=1, **options)
        resumed.load_state_dict(ranks[1].state_dict(4))
        assert len(resumed) == rows
        assert list(resumed) == own[1][4:]
    assert longest != 60 or len(drawn) > 1, "windows of other epochs need other numbers of rows"


def test_an_epoch_that_would_have_more_rows_is_planned_as_one_window(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = torch.randint(5, 60, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    whole = len(PackedBatchSampler(lengths, 64, window=1000))
    sampler = PackedBatchSampler(lengths, 64, window=20)
    drawn = max(len(sampler._drawn(epoch)) for epoch in range(4))
    assert drawn > whole
    sampler.__dict__["_length"] = whole  # as if the first epoch had needed so few
    for epoch in range(4):
        sampler.set_epoch(epoch)
        assert len(list(sampler)) == whole
        assert sampler.dropped == sampler.repeated == 0


def test_overlong_and_empty_samples_by_choice() -> None:
    lengths = [5, 0, 17, 3, 16, 40]
    samples = samples_of(lengths)
    sampler = PackedBatchSampler(lengths, 16, overlong="drop", empty="drop")
    assert sorted(i for row in sampler for i in row) == [0, 3, 4]
    assert sampler.dropped == 3
    for options, message in [
        ({"empty": "drop"}, r"lengths\[2\] = 17 does not fit in 16"),
        ({"overlong": "drop"}, r"lengths\[1\] must be at least 1, got 0"),
        ({"overlong": "truncate"}, "overlong must be 'error' or 'drop'"),
        ({"empty": "keep"}, "empty must be 'error' or 'drop'"),
    ]:
        with pytest.raises(ValueError, match=message):
            PackedBatchSampler(lengths, 16, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="1 samples are too few for 2 ranks"):
        PackedBatchSampler([5, 17], 16, world_size=2, overlong="drop")
    for align in (1, 3):
        loader = packed_dataloader(
            samples, 16, collator=PackedCollator(align=align), overlong="truncate", empty="drop", num_workers=2
        )
        tokens = torch.cat([row["input_ids"][0] for row in loader]).tolist()
        whole = 16 // align * align
        want = {t for sample in samples for t in sample["input_ids"][:whole]}
        assert set(tokens) - {0} == want - {0}
        assert (loader.truncated, loader.batch_sampler.dropped) == (2 if align == 1 else 3, 1)
    with pytest.raises(ValueError, match="is the work of a PackedCollator"):
        packed_dataloader(samples, 16, collator=lambda rows: rows, overlong="truncate")
    with pytest.raises(ValueError, match="max_length"):
        PackedCollator(max_length=0)


def test_rows_that_run_at_the_same_time_cost_alike() -> None:
    costs = torch.rand(240, generator=torch.Generator().manual_seed(0)).square().tolist()

    def waste(**options: Any) -> float:
        """Return what the costliest row of each step costs, over a fair share."""
        steps = PackedBatchSampler([10] * 240, 60, world_size=4, **options).steps
        loads = [[sum(costs[i] for i in row) for row in step] for step in steps]
        return float(4 * sum(map(max, loads)) / sum(map(sum, loads)))

    assert waste(cost=costs) < 1.02 < 1.2 < waste()
