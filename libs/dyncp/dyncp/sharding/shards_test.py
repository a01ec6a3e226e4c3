"""Idle ranks work for every batch that busy ranks work for; padding is the plan's, so that the cap is hard."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from dyncp.planning.planner import plan
from dyncp.planning.sizes import LAYOUTS, Layout, local_tokens
from dyncp.planning.types import DynamicPlan, Group, Step
from dyncp.sharding.batches import split_batch
from dyncp.sharding.shards import pack_group, shard
from seqpack.batches.batch import make_batch
from seqpack.batches.packed import PackedBatch

IMAGE = 77
LENGTHS = (5, 3, 4)
"""The first sample has as many tokens as the `hidden` and `mrope` keys have rows."""


def batch_of_all_kinds() -> TensorDict:
    """Text, per-sample numbers, MRoPE, (5, j) and (j, 5) keys, images; the first sample begins with an image."""
    rows = []
    for n, patches in zip(LENGTHS, (8, 4, 2), strict=True):
        image = torch.arange(n) < n - 2
        rows.append(
            {
                "input_ids": torch.where(image, IMAGE, torch.arange(n) + 1),
                "loss_mask": torch.arange(n) > 0,
                "position_ids": torch.arange(n).expand(3, n).contiguous(),
                "advantages": torch.rand(n),
                "five_rows": torch.rand(5, n),
                "reward": torch.tensor(0.5),
                "group": torch.tensor(n),
                "mm_token_type_ids": image.long(),
                "pixel_values": torch.rand(patches, 6),
                "image_grid_thw": torch.tensor([[1, 2, patches // 2]]),
            }
        )
    batch = make_batch(rows)
    batch.set_non_tensor("answer", "42")
    batch["prompt"] = ["a", "bc", "d"]
    return batch


def ints_of(packed: PackedBatch) -> list[int]:
    return packed.values["input_ids"].tolist()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("cp_size", [1, 2, 3])
@pytest.mark.parametrize("without", [None, "mm_token_type_ids", "pixel_values", "loss_mask", "prompt"])
def test_a_dummy_has_every_key_that_a_sample_has(layout: Layout, cp_size: int, without: str | None) -> None:
    batch = batch_of_all_kinds()
    if without is not None:
        batch = batch.exclude(without)
    busy, idle = pack_group(batch, [0], cp_size, layout), pack_group(batch, [], cp_size, layout)
    assert busy.values.keys() | {"loss_mask"} == idle.values.keys()
    assert busy.extras.keys() == idle.extras.keys()
    assert idle.lengths == (1,)
    assert idle.num_tokens == local_tokens([1], cp_size, layout) * cp_size
    assert not idle.values["loss_mask"].any()
    for key, value in busy.values.items():
        assert idle.values[key].dtype == value.dtype
        assert idle.values[key].dim() == value.dim()
    for rank in range(cp_size):
        assert shard(idle, rank, cp_size, layout).values["input_ids"].shape == (idle.num_tokens // cp_size,)


def test_a_dummy_of_images_is_a_token_of_text_without_pixels() -> None:
    idle = pack_group(batch_of_all_kinds(), [], 2)
    assert ints_of(idle)[0] not in (0, IMAGE)
    assert len(idle.values["pixel_values"]) == len(idle.values["image_grid_thw"]) == 0
    assert idle.media_lengths == {"pixel_values": (0,), "image_grid_thw": (0,)}
    only_images = batch_of_all_kinds()
    only_images["mm_token_type_ids"] = make_batch([{"input_ids": torch.ones(n, dtype=torch.int64)} for n in LENGTHS])[
        "input_ids"
    ]
    with pytest.raises(ValueError, match="a dummy needs one of text"):
        pack_group(only_images, [], 1)


def test_keys_are_cut_along_their_tokens_whatever_else_is_as_long() -> None:
    batch = batch_of_all_kinds()
    idle = pack_group(batch, [], 1)
    place = LENGTHS[0] - 2
    assert torch.equal(idle.values["five_rows"], batch["five_rows"].unbind()[0][:, place : place + 1])
    assert idle.values["position_ids"].tolist() == [[place]] * 3
    assert idle.values["advantages"].tolist() == [batch["advantages"].unbind()[0][place].item()]


def test_text_is_dealt_too() -> None:
    batch = batch_of_all_kinds()
    steps = (Step((Group((0, 1), (2, 0)), Group((2,), (1,)))),)
    made = DynamicPlan(LENGTHS, 3, 8, steps)
    mine, other = split_batch(batch, made, 0, 1), split_batch(batch, made, 0, 2)
    assert mine is not None
    assert other is not None
    assert list(mine["prompt"]) == ["d", "a"]
    assert mine["input_ids"].unbind()[1].tolist() == batch["input_ids"].unbind()[0].tolist()
    assert list(other["prompt"]) == ["bc"]


@given(st.lists(st.integers(1, 90), min_size=1, max_size=12), st.integers(1, 4), st.sampled_from([1, 2, 3, 16, 64]))
def test_what_is_packed_is_what_the_plan_counted(lengths: list[int], world: int, align: int) -> None:
    made = plan(lengths, world, 90 + align, align=align)
    batch = make_batch([{"input_ids": torch.arange(n)} for n in lengths])
    for _, group in made.groups():
        packed = pack_group(batch, group.sample_ids, group.cp_size, made.layout, made.align)
        held = packed.num_tokens // group.cp_size
        assert held % align == 0
        assert held <= made.max_tokens_per_rank
        assert not group.sample_ids or held == made.tokens_per_rank(group)


def test_a_cap_that_holds_no_padding_is_refused_when_planning() -> None:
    with pytest.raises(ValueError, match="sample 0 has 100 tokens and fits no group"):
        plan([100], 1, 100, align=64)
    with pytest.raises(ValueError, match="would hold 128 tokens each, the cap is 100"):
        DynamicPlan((100,), 1, 100, (Step((Group((0,), (0,)),)),), align=64)
