"""Process groups are made in one order on every rank, kept, and bounded; collectives carry gradients."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dyncp.comm.collectives import Shift, all_gather, all_to_all
from dyncp.comm.process_groups import ProcessGroups
from dyncp.exactness.processes import run_world
from dyncp.planning.types import DynamicPlan, Group, Step


def plan_of(*steps: list[list[int]]) -> DynamicPlan:
    """A plan of these rank sets; all samples in the first group."""
    made = []
    for index, step in enumerate(steps):
        made.append(
            Step(tuple(Group(tuple(ranks), (0,) if index == place == 0 else ()) for place, ranks in enumerate(step)))
        )
    return DynamicPlan((3,), 3, 8, tuple(made))


Found = dict[Any, Any]  # by a name, or by the ranks of a group


def groups_over_time() -> Found:
    rank = dist.get_rank()
    out: Found = {}
    cache = ProcessGroups(limit=1)
    cache.prepare(plan_of([[0, 1], [2]]))
    out["world"] = cache.get((0, 1, 2)) is dist.group.WORLD
    out["alone"] = cache.get((1,)) is None
    first = cache.get((0, 1))
    if rank < 2:
        total = torch.tensor([float(rank + 1)])
        dist.all_reduce(total, group=first)
        out["sum"] = total.item()
    cache.prepare(plan_of([[0, 1], [2]], [[0, 1, 2]]))
    out["kept"] = cache.get((0, 1)) is first and cache.created == 1
    cache.prepare(plan_of([[0], [1, 2]]))
    out["bounded"] = (len(cache), cache.created)
    for ranks in ((0, 1), (0, 2)):
        try:
            cache.get(ranks)
        except ValueError as error:
            out[ranks] = str(error)
    try:
        cache.prepare(plan_of([[0, 1], [2]], [[0], [1, 2]]))
    except ValueError as error:
        out["too many"] = str(error)
    cache.close()
    out["closed"] = len(cache)
    mirrored = ProcessGroups(planes=[(2, 1, 0)])
    mirrored.prepare(plan_of([[0, 1], [2]]))
    out["plane"] = dist.get_process_group_ranks(mirrored.get((0, 1))) if rank else [1, 2]
    return out


def gradients() -> Found:
    group, rank = dist.group.WORLD, dist.get_rank()
    assert group is not None
    x = torch.full((2, 3), float(rank), dtype=torch.float64, requires_grad=True)
    weights = torch.arange(18, dtype=torch.float64).view(6, 3) * (rank + 1)
    (all_gather(x, group) * weights).sum().backward()
    assert x.grad is not None
    expected = torch.arange(18, dtype=torch.float64).view(6, 3)[2 * rank : 2 * rank + 2] * 6
    y = torch.arange(3, dtype=torch.float64, requires_grad=True)
    swapped = all_to_all(y + 10 * rank, group)
    (swapped * torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)).sum().backward()
    assert y.grad is not None
    shifted = [Shift(torch.tensor([float(rank)]), group, by).wait().item() for by in (1, -1, 2)]
    return {
        "gather": torch.equal(x.grad, expected),
        "swapped": swapped.tolist(),
        "grad": y.grad.tolist(),
        "shift": shifted,
    }


def three_ranks() -> tuple[Found, Found]:
    return groups_over_time(), gradients()


@pytest.fixture(scope="module")
def found() -> list[tuple[Found, Found]]:
    return run_world(3, three_ranks)


def test_ranks_of_a_plan_are_those_of_their_plane(found: list[tuple[Found, Found]]) -> None:
    assert [sorted(out["plane"]) for out, _ in found] == [[1, 2]] * 3


def test_groups_are_kept_and_bounded(found: list[tuple[Found, Found]]) -> None:
    for rank, (out, _) in enumerate(found):
        assert out["world"]
        assert out["alone"]
        assert out["kept"]
        assert out.get("sum", 3.0) == 3.0
        assert out["bounded"] == (1, 2)
        assert "call prepare(plan)" in out[(0, 1)]
        assert "have no process group yet" in out[(0, 2)]
        assert "needs 2 process groups on rank 1, the limit is 1" in out["too many"]
        assert out["closed"] == 0, rank


def test_collectives_carry_gradients(found: list[tuple[Found, Found]]) -> None:
    for rank, (_, out) in enumerate(found):
        assert out["gather"]
        assert out["swapped"] == [rank, rank + 10, rank + 20]
        assert out["grad"] == [10.0**rank] * 3
        assert out["shift"] == [(rank - 1) % 3, (rank + 1) % 3, (rank - 2) % 3]
