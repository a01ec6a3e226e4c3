"""The streaming packer: every sample once, hard caps, the same rows however many workers, exact resumption."""

import copy
import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, _utils

from seqpack.adapters import IGNORED, PackedCollator, PackedStream, TitanRows
from seqpack.adapters.collator import Sample


@pytest.fixture(scope="module", autouse=True)
def prompt_ends() -> Iterator[None]:
    """Let a DataLoader whose worker raised wait 0.2 s for each worker to end, instead of five."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        yield


class Source:
    """Samples of these lengths, numbered, as often as they are asked for."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter([{"input_ids": [i + 1] * n} for i, n in enumerate(self.lengths)])


class Counting(Source):
    """A source that keeps its own place, as Hugging Face's streams do."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.place = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        samples = list(super().__iter__())
        while self.place < len(samples):
            self.place += 1
            yield samples[self.place - 1]
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.place = state["place"]


def numbers(row: Sequence[Sample]) -> list[int]:
    return [sample["input_ids"][0] for sample in row]


lengths_of = st.lists(st.integers(1, 30), min_size=1, max_size=120)


@settings(max_examples=30, deadline=None)
@given(lengths_of, st.integers(1, 6), st.sampled_from([1, 4]), st.sampled_from([None, 16]))
def test_every_sample_once_under_the_cap_and_none_waits_long(
    lengths: list[int], lookahead: int, align: int, bucket: int | None
) -> None:
    stream = PackedStream(Source(lengths), 32, lookahead=lookahead, align=align, bucket=bucket)
    rows = list(stream)
    assert sorted(n for row in rows for n in numbers(row)) == list(range(1, len(lengths) + 1))
    collator = PackedCollator(align=align, bucket=bucket)
    assert all(collator(row)["input_ids"].shape[1] <= 32 for row in rows)
    # A plan holds at most lookahead rows' worth of tokens and one sample more, so each of its samples has a place
    # among so many rows: two plans bound how long one can wait.
    newest = 0
    for row in rows:
        newest = max(newest, *numbers(row))
        oldest = min(numbers(row))
        tokens = sum(-(-n // align) * align for n in lengths[oldest - 1 : newest])
        assert tokens <= 2 * (lookahead + 1) * 32 + 2 * 32


@pytest.mark.parametrize("lookahead", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 7])
def test_a_sample_that_fits_beside_no_other_is_not_left_waiting(lookahead: int, at: int) -> None:
    """Its row is the emptiest of every plan; it waits for one plan all the same, and not for the end."""
    lengths = [32] * 60
    lengths[at] = 5
    rows = [numbers(row) for row in PackedStream(Source(lengths), 32, lookahead=lookahead)]
    assert rows.index([at + 1]) <= at + 2 * (lookahead + 1)


@settings(max_examples=20, deadline=None)
@given(lengths_of, st.integers(2, 4))
def test_ranks_share_the_rows_of_one_stream(lengths: list[int], world: int) -> None:
    whole = [numbers(row) for row in PackedStream(Source(lengths), 32, lookahead=3)]
    if len(whole) < world:  # so many rows are too few, which another test is about
        with pytest.raises(ValueError, match="no row"):
            list(PackedStream(Source(lengths), 32, lookahead=3, world_size=world))
        return
    ranks = [
        [numbers(row) for row in PackedStream(Source(lengths), 32, lookahead=3, rank=rank, world_size=world)]
        for rank in range(world)
    ]
    steps = len(whole) // world
    assert [len(rows) for rows in ranks] == [steps] * world
    assert [ranks[k % world][k // world] for k in range(steps * world)] == whole[: steps * world]
    alone = [
        [
            n
            for row in PackedStream(Source(lengths), 32, rank=rank, world_size=world, shard="samples")
            for n in numbers(row)
        ]
        for rank in range(world)
    ]
    assert [sorted(own) for own in alone] == [list(range(r + 1, len(lengths) + 1, world)) for r in range(world)]


LENGTHS = [int(n) for n in torch.randint(1, 30, (150,), generator=torch.Generator().manual_seed(0))]


def fresh(kind: type[Source] = Source, **options: Any) -> PackedStream:
    return PackedStream(kind(LENGTHS), 32, **{"lookahead": 4, **options})


@pytest.mark.parametrize(
    "options", [{}, {"rank": 1, "world_size": 2}, {"rank": 1, "world_size": 2, "shard": "samples"}]
)
@pytest.mark.parametrize("kind", [Source, Counting])
def test_a_state_goes_on_exactly(options: dict[str, Any], kind: type[Source]) -> None:
    whole = [numbers(row) for row in fresh(kind, **options)]
    for done in (0, 1, 7, len(whole) - 1, len(whole)):
        stream = fresh(kind, **options)
        rows = iter(stream)
        for _ in range(done):
            next(rows)
        state = json.loads(json.dumps(stream.state_dict()))  # plain data
        later = fresh(kind, **options)
        later.load_state_dict(copy.deepcopy(state))
        assert later.state_dict() == state
        assert [numbers(row) for row in later] == whole[done:]
        anew = fresh(**options)
        anew.load_state_dict({"rows": done})
        assert [numbers(row) for row in anew] == whole[done:]


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_do_not_depend_on_the_workers(workers: int) -> None:
    stream = fresh(rank=1, world_size=2)
    whole = [numbers(row) for row in stream]
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    assert [numbers(row) for row in loader] == whole
    for rows in (3, 4):  # the first worker gives the first row from there on
        stream.load_state_dict({"rows": rows})
        assert [numbers(row) for row in loader] == whole[rows:]


def test_rows_are_full() -> None:
    rows = [sum(len(s["input_ids"]) for s in row) for row in PackedStream(Source(LENGTHS * 4), 64, lookahead=16)]
    assert sum(rows) / (64 * len(rows)) > 0.97
    others: dict[str, Any] = {"world_size": 8, "shard": "samples"}  # their samples are read too, but fill no row here
    stream = PackedStream(Source(LENGTHS * 8), 64, lookahead=4, **others)
    rows = [sum(len(s["input_ids"]) for s in row) for row in stream]
    assert sum(rows) / (64 * len(rows)) > 0.95


def test_rows_for_torchtitan() -> None:
    rows = TitanRows(fresh(), pad_token_id=7)
    plain = list(fresh())
    for (inputs, labels), samples in zip(rows, plain, strict=True):
        want_ids: list[int] = []
        want_labels: list[int] = []
        want_positions: list[int] = []
        for sample in samples:
            ids = sample["input_ids"]
            want_ids += ids
            want_labels += [*ids[1:], IGNORED]
            want_positions += range(len(ids))
        pad = 32 - len(want_ids)
        assert inputs["input"].tolist() == want_ids + [7] * pad
        assert inputs["positions"].tolist() == want_positions + list(range(pad))
        assert labels.tolist() == want_labels + [IGNORED] * pad
    taken = iter(rows)
    next(taken)
    later = TitanRows(fresh())
    later.load_state_dict(rows.state_dict())
    assert len(list(later)) == len(plain) - 1
    batch = next(iter(DataLoader(TitanRows(fresh()), batch_size=3)))
    assert batch[0]["input"].shape == batch[1].shape == (3, 32)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="sample 2 of the source has 40 tokens"):
        list(PackedStream(Source([3, 4, 40]), 32))
    with pytest.raises(ValueError, match=r'sample 1 of the source has no tokens: leave it out, or pass empty="drop"'):
        list(PackedStream(Source([3, 0, 40]), 32, overlong="drop"))
    with pytest.raises(ValueError, match="input_ids of sample 0 of the source is 'ab'"):
        list(PackedStream([{"input_ids": "ab"}], 32))
    wrongs: list[dict[str, Any]] = [
        {"rank": 1},
        {"shard": "files"},
        {"lookahead": 0},
        {"align": 64},
        {"overlong": "cut"},
        {"empty": "truncate"},
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PackedStream(Source([1]), 32, **wrong)
    with pytest.raises(ValueError, match="'rows'"):
        fresh().load_state_dict({})
    with pytest.raises(ValueError, match="bucket"):
        TitanRows(fresh(bucket=32))
    stream = fresh(shard="samples")
    stream.load_state_dict({"rows": 1})
    with pytest.raises(ValueError, match="states of all workers"):
        list(DataLoader(stream, batch_size=None, num_workers=2))


def given_state(**options: Any) -> dict[str, Any]:
    """The state of a stream after two rows, through JSON."""
    stream = fresh(**options)
    rows = iter(stream)
    next(rows), next(rows)
    state: dict[str, Any] = json.loads(json.dumps(stream.state_dict()))
    return state


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("max_tokens", {}),
        ("lookahead", {"lookahead": 5}),
        ("world_size", {"world_size": 2}),
        ("shard", {"shard": "samples"}),
        ("align", {"align": 2}),
        ("overlong", {"overlong": "drop"}),
        ("empty", {"empty": "drop"}),
        ("bucket", {"bucket": (16, 32)}),
    ],
)
def test_a_state_of_other_settings_is_refused(name: str, options: dict[str, Any]) -> None:
    other = PackedStream(Source(LENGTHS), 40 if name == "max_tokens" else 32, **{"lookahead": 4, **options})
    with pytest.raises(ValueError, match=f"this state is of a stream with {name}="):
        other.load_state_dict(given_state())
    unused = json.loads(json.dumps(fresh().state_dict()))
    with pytest.raises(ValueError, match=f"this state is of a stream with {name}="):
        other.load_state_dict(unused)
    again = given_state(**options) if name != "max_tokens" else given_state()
    fresh(**options).load_state_dict(again)
    del again["settings"]
    with pytest.raises(ValueError, match="this state is of a stream with max_tokens=None"):
        fresh(**options).load_state_dict(again)


def test_a_state_holds_for_any_rank_where_all_read_the_same() -> None:
    whole = [numbers(row) for row in fresh(rank=1, world_size=2)]
    other = fresh(rank=1, world_size=2)
    other.load_state_dict(given_state(rank=0, world_size=2))
    assert [numbers(row) for row in other] == whole[2:]
    with pytest.raises(ValueError, match="rank=0, this one has 1"):
        fresh(rank=1, world_size=2, shard="samples").load_state_dict(given_state(rank=0, world_size=2, shard="samples"))


def test_a_state_that_only_workers_know_is_refused() -> None:
    stream = fresh()
    whole = [numbers(row) for row in fresh()]
    loader = DataLoader(stream, batch_size=None, num_workers=1)
    list(loader)
    with pytest.raises(ValueError, match="the workers of a DataLoader keep this stream's state"):
        stream.state_dict()
    stream.load_state_dict({"rows": 3})
    assert stream.state_dict() == {"rows": 3}
    assert [numbers(row) for row in loader] == whole[3:]
    with pytest.raises(ValueError, match="the workers of a DataLoader keep"):
        stream.state_dict()  # not the state that was loaded
    assert [numbers(row) for row in loader] == whole, "a loaded state holds for one iteration, with workers too"
    next(iter(stream))
    assert stream.state_dict()["rows"] == 1


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_left_out_of_the_last_step_are_counted(workers: int) -> None:
    sizes = [len(row) for row in fresh()]
    stream = fresh(world_size=5, rank=3)
    assert len(sizes) % 5
    assert stream.dropped == 0
    list(DataLoader(stream, batch_size=None, num_workers=workers))
    assert stream.dropped == sum(sizes[-(len(sizes) % 5) :])
    whole = fresh()
    assert len(list(whole)) == len(sizes)
    assert whole.dropped == 0


@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_without_a_row_is_an_error(workers: int) -> None:
    def rows(lengths: list[int], **options: Any) -> list[Any]:
        return list(DataLoader(PackedStream(Source(lengths), 16, **options), batch_size=None, num_workers=workers))

    with pytest.raises(ValueError, match=r"gives rank 1 of 4 no row \(3 samples in 1 rows\)"):
        rows([2, 3, 4], rank=1, world_size=4)
    with pytest.raises(ValueError, match="gives rank 0 of 1 no row"):
        rows([])
    with pytest.raises(ValueError, match="gives rank 2 of 3 no row"):
        rows([9], rank=2, world_size=3, shard="samples")
    assert len(rows([9], shard="samples")) == len(rows([9])) == 1  # the second worker has none, the rank does
    ended = PackedStream(Source([9]), 16)
    ended.load_state_dict({"rows": 1})
    assert list(DataLoader(ended, batch_size=None, num_workers=workers)) == []
    ended.load_state_dict({"rows": 2})
    with pytest.raises(ValueError, match="the state is after row 2 of this rank, the source gives it 1"):
        list(DataLoader(ended, batch_size=None, num_workers=workers))


@pytest.mark.parametrize("sample", [{"text": "x"}, [1, 2], {"input_ids": None, "text": "x"}])
def test_a_sample_without_tokens_is_named(sample: Any) -> None:
    with pytest.raises(ValueError, match=r"sample 1 of the source has no input_ids, only (text|list|input_ids, text)"):
        list(PackedStream([{"input_ids": [1]}, sample], 16))


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shard", ["rows", "samples"])
def test_overlong_and_empty_samples_are_left_out_and_counted(workers: int, shard: Any) -> None:
    lengths = [*LENGTHS[:60], 0, 33, 0, 5, 40]
    seen = []
    for rank in range(2):
        stream = PackedStream(
            Source(lengths), 32, lookahead=4, rank=rank, world_size=2, shard=shard, overlong="drop", empty="drop"
        )
        loader = DataLoader(stream, batch_size=None, num_workers=workers)
        seen += [n for row in loader for n in numbers(row)]
        assert stream.counts[:3] == (2, 2, 0)
        assert stream.dropped == 4 + stream.counts.last_step
    assert not {61, 62, 63, 65} & set(seen)
    assert len(seen) == len(set(seen)) == len(lengths) - stream.dropped


def test_counts_are_told_before_the_end_and_go_on_with_a_state() -> None:
    def stream() -> PackedStream:
        return PackedStream(Source([33, 0, *LENGTHS, 0, 40]), 32, lookahead=4, overlong="truncate", empty="drop")

    first, later = stream(), stream()
    rows = iter(first)
    next(rows), next(rows)
    assert first.counts == (0, 1, 1, 0)
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [numbers(row) for row in later] == [numbers(row) for row in rows]
    assert later.counts == first.counts == (0, 2, 2, 0)
    assert later.dropped == 2


@pytest.mark.parametrize("align", [1, 5])
def test_a_truncated_sample_keeps_its_first_tokens_in_every_column(align: int) -> None:
    ids = list(range(1, 41))
    sample = {
        "input_ids": ids,
        "labels": torch.tensor(ids),
        "loss_mask": [True] * 40,
        "position_ids": [list(range(40))] * 3,
        "assistant_masks": None,
        "length": 40,
        "text": "x" * 40,
    }
    (row,) = PackedStream([sample], 32, align=align, overlong="truncate")
    whole = 32 // align * align
    cut = row[0]
    assert cut["input_ids"] == ids[:whole]
    assert cut["labels"].tolist() == ids[:whole]
    assert (cut["loss_mask"], cut["position_ids"]) == ([True] * whole, [list(range(whole))] * 3)
    assert (cut["assistant_masks"], cut["length"], cut["text"]) == (None, whole, "x" * 40)
    assert sample["length"] == 40, "the source's own sample is as it was"
    assert PackedCollator(ignore=("text",), align=align)(row)["input_ids"].shape == (1, whole)
    tensor = {"input_ids": torch.tensor(ids), "position_ids": torch.arange(40).repeat(3, 1)}
    (row,) = PackedStream([tensor], 32, align=align, overlong="truncate")
    assert PackedCollator(align=align)(row)["position_ids"].shape == (3, 1, whole)
