"""Any plan gives the same gradient: every rank divides its loss sum by the plan's trained tokens, ranks and steps are
added.

All ranks are played in this process: losses are of single tokens, so nothing is exchanged and only the dealing is on
trial.
"""

from itertools import pairwise
from typing import get_args

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from dyncp.planning.cost import CostModel
from dyncp.planning.planner import plan
from dyncp.planning.sizes import Layout
from dyncp.planning.types import DynamicPlan, Group, Step
from dyncp.sharding.batches import split_batch
from dyncp.sharding.shards import pack_group, shard, unshard
from seqpack.batches.batch import make_batch

ATTENTION = CostModel(delta_layers=0)


def make(lengths: list[int]) -> TensorDict:
    generator = torch.Generator().manual_seed(len(lengths))
    return make_batch(
        [
            {
                "input_ids": torch.randint(0, 9, (n,), generator=generator),
                "loss_mask": (torch.arange(n) > 0) & (torch.rand(n, generator=generator) > 0.3),
                "features": torch.randn(3, n, generator=generator, dtype=torch.float64),
                "reward": float(n),
            }
            for n in lengths
        ]
    )


@st.composite
def plans(draw: st.DrawFn) -> DynamicPlan:
    """Any plan at all: random partitions of the ranks, samples dealt at random, dummies of any size."""
    lengths = draw(st.lists(st.integers(1, 14), min_size=1, max_size=7))
    world = draw(st.integers(1, 5))
    layout: Layout = draw(st.sampled_from(get_args(Layout)))
    steps: list[list[tuple[tuple[int, ...], list[int]]]] = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = sorted({0, world, *draw(st.lists(st.integers(1, world), max_size=3))})
        steps.append([(tuple(range(a, b)), []) for a, b in pairwise(cuts)])
    groups = [group for step in steps for group in step]
    for sample in range(len(lengths)):
        groups[draw(st.integers(0, len(groups) - 1))][1].append(sample)
    made = tuple(Step(tuple(Group(ranks, tuple(samples)) for ranks, samples in step)) for step in steps)
    return DynamicPlan(tuple(lengths), world, 1000, made, layout=layout)


def gradient(made: DynamicPlan, batch: TensorDict, trained: int) -> torch.Tensor:
    weights = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    for index, step in enumerate(made.steps):
        for group in step.groups:
            mine = split_batch(batch, made, index, group.ranks[0])
            count = 0 if mine is None else mine.batch_size[0]
            packed = pack_group(batch if mine is None else mine, range(count), group.cp_size, made.layout)
            assert packed.num_tokens <= max(made.max_tokens_per_rank, 2) * group.cp_size
            for rank in range(group.cp_size):
                part = shard(packed, rank, group.cp_size, made.layout)
                losses = (weights @ part.values["features"]).exp() * (1 + part.position_ids)
                (losses * part.values["loss_mask"]).sum().div(trained).backward()
    assert weights.grad is not None
    return weights.grad


@settings(deadline=None, max_examples=40)
@given(plans())
def test_any_plan_gives_the_same_gradient(made: DynamicPlan) -> None:
    batch = make(list(made.lengths))
    trained = max(1, int(batch["loss_mask"].values().sum()))
    whole = DynamicPlan(made.lengths, 1, 10**6, (Step((Group((0,), tuple(range(len(made.lengths)))),)),))
    expected = gradient(whole, batch, trained)
    torch.testing.assert_close(gradient(made, batch, trained), expected, rtol=1e-12, atol=1e-12)
    chosen = plan(made.lengths, made.world_size, 28, ATTENTION, layout=made.layout, trained_tokens=trained)
    assert chosen.trained_tokens == trained
    torch.testing.assert_close(gradient(chosen, batch, chosen.trained_tokens), expected, rtol=1e-12, atol=1e-12)


@settings(deadline=None, max_examples=40)
@given(plans())
def test_shards_put_together_are_the_stream(made: DynamicPlan) -> None:
    batch = make(list(made.lengths))
    for size in range(1, made.world_size + 1):
        packed = pack_group(batch, range(len(made.lengths)), size, made.layout)
        parts = [shard(packed, rank, size, made.layout) for rank in range(size)]
        for key, dim in (("input_ids", 0), ("features", 1)):
            assert torch.equal(unshard([p.values[key] for p in parts], parts[0].sharding, dim=dim), packed.values[key])
        assert torch.equal(unshard([p.position_ids for p in parts], parts[0].sharding), packed.positions)
        assert all(torch.equal(p.values["reward"], packed.values["reward"]) for p in parts)
