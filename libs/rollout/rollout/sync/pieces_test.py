"""Pieces, buckets and checksums: whatever the cuts, the same tensors arrive bit for bit."""

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.sync.assembler import WeightAssembler, assemble
from rollout.sync.boxes import Box
from rollout.sync.pieces import BucketPiece, buckets, checksum
from rollout.testing.pieces import pieces_of

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def tensors_of(sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    made = {}
    for i, (rows, columns) in enumerate(sizes):
        dtype = DTYPES[i % len(DTYPES)]
        made[f"w{i}"] = (torch.arange(rows * columns) * 7 % 113 - 50).to(dtype).view(rows, columns)
    return made


sizes = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=6)


@given(sizes, st.one_of(st.none(), st.integers(1, 50)), st.integers(1, 400))
def test_cut_bucketed_and_joined_is_the_same(
    shape_list: list[tuple[int, int]], max_elements: int | None, max_bytes: int
) -> None:
    tensors = tensors_of(shape_list)
    made = list(buckets(pieces_of(tensors.items(), max_elements), max_bytes))
    for bucket in made:
        assert bucket.buffer.numel() <= max_bytes or len(bucket.headers) == 1
        assert all(h.start % 16 == 0 for h in bucket.headers)
    assembler = WeightAssembler({n: torch.empty_like(t) for n, t in tensors.items()})
    for bucket in made:
        for piece in bucket.pieces():
            assembler.add(piece)
    arrived = assembler.finish()
    assert arrived.keys() == tensors.keys()
    for name, value in tensors.items():
        assert torch.equal(arrived[name], value)
        assert arrived[name].dtype == value.dtype


@given(sizes, st.integers(1, 50))
def test_a_checksum_ignores_cuts_and_order_of_tensors(shape_list: list[tuple[int, int]], max_elements: int) -> None:
    tensors = tensors_of(shape_list)
    whole = checksum(pieces_of(tensors.items()))
    assert checksum(pieces_of(tensors.items(), max_elements)) == whole
    assert checksum(pieces_of(reversed(list(tensors.items())))) == whole


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.update(w0=t["w0"] + 1),
        lambda t: t.update(w0=t["w0"].view(3, 2)),
        lambda t: t.update(w0=t["w0"].double()),
        lambda t: t.update(v0=t.pop("w0")),
        lambda t: t.pop("w1"),
        lambda t: t.update(w0=torch.where(t["w0"] == 0, -0.0, t["w0"])),
    ],
)
def test_a_checksum_sees_every_change(change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = {"w0": torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]), "w1": torch.ones(2)}
    before = checksum(pieces_of(tensors.items()))
    change(tensors)
    assert checksum(pieces_of(tensors.items())) != before


def test_a_checksum_wants_order_within_a_tensor() -> None:
    pieces = list(pieces_of([("w", torch.arange(4.0))], 2))
    with pytest.raises(ValueError, match="in order"):
        checksum(reversed(pieces))


def test_pieces_arrive_in_any_order_and_are_cast_to_the_models_type() -> None:
    target = torch.zeros(2, 3, dtype=torch.bfloat16)
    assembler = WeightAssembler({"w": target})
    for piece in reversed(list(pieces_of([("w", torch.arange(6.0).view(2, 3))], 2))):
        assembler.add(piece)
    assert torch.equal(assembler.finish()["w"], torch.arange(6.0).view(2, 3).bfloat16())
    assert not target.any()  # nothing is written before everything is there


def test_a_piece_must_be_what_it_says() -> None:
    assembler = WeightAssembler({"w": torch.zeros(2)})
    with pytest.raises(ValueError, match="said to be"):
        assembler.add(BucketPiece("w", (2,), torch.float32, 0, torch.zeros(2, dtype=torch.float64)))


def test_optional_names_may_be_missing() -> None:
    assembler = WeightAssembler({"w": torch.zeros(2), "buffer": torch.zeros(1)}, optional=["buffer"])
    for piece in pieces_of([("w", torch.ones(2))]):
        assembler.add(piece)
    assert list(assembler.finish()) == ["w"]


def test_sizes_are_checked() -> None:
    with pytest.raises(ValueError, match="max_bytes"):
        list(buckets([], 0))
    with pytest.raises(ValueError, match="max_elements"):
        list(pieces_of([], 0))


def test_a_faulty_stream_is_read_to_its_end() -> None:
    read: list[str] = []

    def stream() -> Iterator[BucketPiece]:
        for piece in pieces_of([("v", torch.ones(2)), ("w", torch.ones(2)), ("x", torch.ones(1))]):
            read.append(piece.name)
            yield piece

    with pytest.raises(ValueError, match="unknown weight 'v'"):
        assemble(WeightAssembler({"w": torch.zeros(2)}), stream())
    assert read == ["v", "w", "x"]


def box_piece(box: Box, value: float = 1.0) -> BucketPiece:
    return BucketPiece("w", (4, 6), torch.float32, 0, torch.full((box.numel,), value), box)


def test_boxes_fill_a_tensor_in_any_order() -> None:
    """Columns beside each other, and a row: what each has lies at its place."""
    assembler = WeightAssembler({"w": torch.empty(4, 6)})
    for number, box in enumerate([Box((1, 4), (3, 2)), Box((0, 0), (1, 6)), Box((1, 0), (3, 4))]):
        assembler.add(box_piece(box, float(number)))
    expected = torch.zeros(4, 6)
    expected[0], expected[1:, :4] = 1.0, 2.0
    assert torch.equal(assembler.finish()["w"], expected)


def test_boxes_that_overlap_lack_something_or_do_not_fit_are_refused() -> None:
    def filled(*boxes: Box) -> WeightAssembler:
        made = WeightAssembler({"w": torch.empty(4, 6)})
        for box in boxes:
            made.add(box_piece(box))
        return made

    with pytest.raises(ValueError, match="arrived twice"):
        filled(Box((0, 0), (2, 6)), Box((1, 0), (3, 6))).finish()
    with pytest.raises(ValueError, match="never arrived"):
        filled(Box((0, 0), (2, 6))).finish()
    for box in (Box((3, 0), (2, 6)), Box((0,), (24,))):
        with pytest.raises(ValueError, match="do not fit"):
            filled(box)
    mixed = filled(Box((0, 0), (2, 6)))
    mixed.add(BucketPiece("w", (4, 6), torch.float32, 12, torch.zeros(12)))
    with pytest.raises(ValueError, match="in runs and in boxes"):
        mixed.finish()
