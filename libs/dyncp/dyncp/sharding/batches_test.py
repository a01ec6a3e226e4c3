"""split_batch and merge_outputs are exact inverses, for worlds of one and four processes and any number of samples."""

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict

from dyncp.comm.plan_hash import check_same_plan
from dyncp.exactness.processes import run_world
from dyncp.planning.types import DynamicPlan, Group, Step, seed_plan
from dyncp.sharding.batch_rows import KeyForm, from_rows, key_forms, to_rows
from dyncp.sharding.batches import merge_outputs, split_batch


def make_batch(lengths: list[int]) -> TensorDict:
    generator = torch.Generator().manual_seed(sum(lengths))
    rows = [
        {
            "input_ids": torch.randint(0, 99, (n,), generator=generator),
            "loss_mask": torch.rand(n, generator=generator) > 0.5,
            "position_ids": torch.arange(n).expand(3, n).contiguous(),
            "hidden": torch.randn(n, 2, generator=generator, dtype=torch.bfloat16),
            "reward": torch.randn((), generator=generator),
            "vector": torch.randn(2, 2, generator=generator, dtype=torch.float64),
        }
        for n in lengths
    ]
    forms = {
        "input_ids": KeyForm("int64", 0),
        "loss_mask": KeyForm("bool", 0),
        "position_ids": KeyForm("int64", 1),
        "hidden": KeyForm("bfloat16", 0),
        "reward": KeyForm("float32", None),
        "vector": KeyForm("float64", None),
    }
    return from_rows(rows, forms)


def assert_same(a: TensorDict, b: TensorDict) -> None:
    assert key_forms(a) == key_forms(b)
    for mine, theirs in zip(to_rows(a), to_rows(b), strict=True):
        for key, value in mine.items():
            assert torch.equal(value, theirs[key]), key


LENGTHS = [[4], [3, 3, 3], [1, 1], [5, 1, 7, 2, 2], [9, 8, 7, 6, 5, 4, 3, 2]]


def round_trips(world: int) -> int:
    """Every plan the seed's rule makes, as a function of this process' rank; returns how many were checked."""
    rank = dist.get_rank() if world > 1 else 0
    count = 0
    for lengths in LENGTHS:
        batch = make_batch(lengths)
        for cp_size in (size for size in (1, 2, 4) if world % size == 0):
            plan = seed_plan(tuple(lengths), world, 16, cp_size)
            parts = [split_batch(batch, plan, step, rank) for step in range(len(plan.steps))]
            assert_same(merge_outputs(parts, plan), batch)
            count += 1
    return count


def mixed_sizes() -> bool:
    """A step of sizes 3 and 1, and one in which two ranks do nothing: still the batch again."""
    steps = (
        Step((Group((0, 1, 2), (4, 0)), Group((3,), (2,)))),
        Step((Group((0, 1), ()), Group((2, 3), (1, 3)))),
    )
    plan = DynamicPlan((5, 1, 7, 2, 9), 4, 16, steps)
    batch = make_batch(list(plan.lengths))
    assert_same(merge_outputs([split_batch(batch, plan, step, dist.get_rank()) for step in (0, 1)], plan), batch)
    return True


def refusals(world: int) -> list[str]:
    """What each rank is told when plans or outputs differ."""
    rank = dist.get_rank()
    plan = seed_plan((3, 4), world, 16, 1)
    check_same_plan(plan)
    messages = []
    odd = seed_plan((3, 4 + rank // (world - 1)), world, 16, 1)
    checks = (
        lambda: check_same_plan(odd),
        lambda: check_same_plan(seed_plan((3, 4), 2 * world, 16, 1)),
        lambda: check_same_plan(seed_plan((3, 4), world if rank else 2 * world, 16, 1)),
        lambda: merge_outputs([TensorDict({f"key{rank}": torch.zeros(1)}, [1])], plan),
    )
    for check in checks:
        try:
            check()
        except ValueError as error:
            messages.append(str(error))
    return messages


def four_ranks() -> tuple[int, list[str], bool]:
    return round_trips(4), refusals(4), mixed_sizes()


def test_a_world_of_one() -> None:
    assert round_trips(1) == len(LENGTHS)


def test_four_processes() -> None:
    for count, messages, mixed in run_world(4, four_ranks):
        assert mixed
        assert count == 3 * len(LENGTHS)
        assert len(messages) == 4
        assert "ranks [3] hold another plan than rank 0" in messages[0]
        assert "the plan is for 8 ranks, this process group has 4" in messages[1]
        assert "ranks [0] hold another plan than rank 1" in messages[2]
        assert "ranks hand in different outputs" in messages[3]


def test_the_merge_says_what_is_missing() -> None:
    plan = DynamicPlan((3,), 1, 4, seed_plan((3,), 1, 4, 1).steps)
    with pytest.raises(ValueError, match="its output has 0 rows"):
        merge_outputs([None], plan)
    with pytest.raises(ValueError, match="one output for each"):
        merge_outputs([], plan)
    with pytest.raises(ValueError, match="made for 1 samples, the batch has 2"):
        split_batch(make_batch([1, 2]), plan, 0, 0)
    with pytest.raises(ValueError, match="'text' holds"):
        merge_outputs([TensorDict({"text": TensorDict({}, [1])}, [1])], plan)
