"""Positions held to transformers' own, over random grids, batches and padding; and a batch's media through seqpack."""

from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model

from seqpack.batches.batch import make_batch, view_batch
from seqpack.batches.jagged import samples_of
from seqpack.batches.mrope import grid_tokens, mrope_positions, sequence_positions
from seqpack.batches.operations import chunk, concat, index_select, split
from seqpack.batches.packed import pack_sequences, unpack_sequences

Row = tuple[list[int], Tensor, Tensor]
"""(types, image grids, video grids) of a sequence."""


def stock(merge: int) -> Any:
    """Transformers' functions on something that has nothing but the config that they read."""
    model = SimpleNamespace(config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=merge)))
    model.get_vision_position_ids = MethodType(Qwen3_5Model.get_vision_position_ids, model)
    model.get_rope_index = MethodType(Qwen3_5Model.get_rope_index, model)
    return model


@st.composite
def rows(draw: Any, merge: int) -> Row:
    """Texts with images and videos between them; media never touch, as in every template (stock code wants that)."""
    types: list[int] = [0] * draw(st.integers(1, 5))
    images: list[tuple[int, int, int]] = []
    videos: list[tuple[int, int, int]] = []
    for kind in draw(st.lists(st.sampled_from("iv"), max_size=4)):
        side = st.integers(1, 4).map(lambda n: n * merge)
        grid = (1 if kind == "i" else draw(st.integers(1, 3)), draw(side), draw(side))
        (images if kind == "i" else videos).append(grid)
        for _ in range(grid[0]):
            types += [1 if kind == "i" else 2] * grid_tokens((1, *grid[1:]), merge) + [0] * draw(st.integers(1, 5))
    as_tensor = [torch.tensor(grids, dtype=torch.int64).view(-1, 3) for grids in (images, videos)]
    return types, as_tensor[0], as_tensor[1]


@given(st.data(), st.sampled_from([1, 2, 3]), st.sampled_from(["left", "right"]))
@settings(max_examples=25, deadline=None)
def test_positions_and_deltas_are_those_of_transformers(data: st.DataObject, merge: int, side: str) -> None:
    batch = data.draw(st.lists(rows(merge), min_size=1, max_size=4))
    width = max(len(types) for types, _, _ in batch) + data.draw(st.integers(0, 2))
    pads = [width - len(types) for types, _, _ in batch]
    pair = [((p, 0) if side == "left" else (0, p)) for p in pads]
    types = torch.tensor([[0] * a + t + [0] * b for (a, b), (t, _, _) in zip(pair, batch, strict=True)])
    mask = torch.tensor([[0] * a + [1] * len(t) + [0] * b for (a, b), (t, _, _) in zip(pair, batch, strict=True)])
    images, videos = torch.cat([row[1] for row in batch]), torch.cat([row[2] for row in batch])
    want, delta = stock(merge).get_rope_index(
        torch.zeros_like(types), types, images, videos.clone(), attention_mask=mask
    )
    got, ahead = mrope_positions(types, images, videos, merge, mask)
    assert got.dtype == torch.int64
    assert torch.equal(got, want)
    assert torch.equal(ahead, delta)
    four, _ = mrope_positions(types, images, videos, merge, mask, text_axis=True)
    assert torch.equal(four[1:], want)
    assert torch.equal(four[0], (mask.cumsum(1) - 1) * mask)


@given(st.data())
@settings(max_examples=10, deadline=None)
def test_packed_rows_have_the_positions_of_each_alone_and_media_survive_the_algebra(data: st.DataObject) -> None:
    drawn = data.draw(st.lists(rows(2), min_size=2, max_size=5))
    samples = []
    for types, images, videos in drawn:
        samples.append(
            {
                "input_ids": torch.randint(9, (len(types),)),
                "mm_token_type_ids": torch.tensor(types),
                "position_ids": sequence_positions(torch.tensor(types), images, videos),
                "pixel_values": torch.randn(int(images.prod(-1).sum()), 3),
                "image_grid_thw": images,
                "pixel_values_videos": torch.randn(int(videos.prod(-1).sum()), 3),
                "video_grid_thw": videos,
            }
        )
    batch, order = make_batch(samples), data.draw(st.permutations(range(len(samples))))
    packed = pack_sequences(batch, order, align=4)
    at = 0
    for row, aligned in zip(order, packed.geometry.aligned, strict=True):
        alone, _ = mrope_positions(torch.tensor([drawn[row][0]]), drawn[row][1], drawn[row][2])
        assert torch.equal(packed.position_ids[:, at : at + alone.shape[2]], alone[:, 0])
        at += aligned
    assert packed.media_lengths["image_grid_thw"] == tuple(len(drawn[row][1]) for row in order)
    cut = data.draw(st.integers(1, len(samples) - 1))
    for found, wanted in (
        (unpack_sequences(packed), order),
        (index_select(batch, list(order)), order),
        (concat(list(chunk(batch, cut))), range(len(samples))),
        (concat(list(split(batch, [cut, len(samples) - cut]))), range(len(samples))),
        (view_batch(batch).select(list(order)).to_batch(), order),
    ):
        for key in samples[0]:
            assert all(
                torch.equal(a, samples[row][key]) for a, row in zip(samples_of(found[key]), wanted, strict=True)
            ), key


def test_a_stream_of_text_has_the_same_position_on_every_axis() -> None:
    assert torch.equal(sequence_positions(torch.zeros(5, dtype=torch.int64)), torch.arange(5).expand(3, -1))


def test_images_side_by_side_each_take_their_own_grid() -> None:
    """Stock transformers takes neighbours of one type for one image; a prompt may have them."""
    grids = torch.tensor([[1, 2, 4], [1, 4, 2]])
    found = sequence_positions(torch.tensor([0, 1, 1, 1, 1, 0]), grids)
    assert found.tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 3, 5]]


@pytest.mark.parametrize(
    ("types", "images", "problem"),
    [
        ([0, 1, 1], [[1, 2, 2]], "row 0 has 1 tokens of type 1 more than its image grids"),
        ([0, 1], [[1, 4, 2]], "row 0 has a run of 1 image tokens where the grid"),
        ([0, 0], [[1, 2, 2]], "1 image grids are left over"),
        ([0, 2], [[1, 2, 2]], "row 0 has 1 tokens of type 2 more than its video grids"),
        ([0, 3], [], "row 0 has tokens of type 3"),
        ([0, 1], [[1, 3, 2]], r"the grid \(1, 3, 2\)"),
    ],
)
def test_tokens_that_do_not_fit_their_grids_are_refused(
    types: list[int], images: list[list[int]], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        mrope_positions(torch.tensor([types]), torch.tensor(images, dtype=torch.int64).view(-1, 3))


def test_shapes_are_checked() -> None:
    with pytest.raises(ValueError, match=r"must be \(B, T\)"):
        mrope_positions(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"image_grid_thw must be \(n, 3\)"):
        mrope_positions(torch.zeros(1, 3, dtype=torch.int64), torch.tensor([1, 2, 2]))
