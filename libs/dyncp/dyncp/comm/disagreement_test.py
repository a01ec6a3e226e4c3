"""Ranks that disagree, or that do not come, make every rank raise within the world's timeout: real processes."""

import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from dyncp.comm.process_groups import ProcessGroups, world_timeout
from dyncp.exactness.processes import run_world
from dyncp.ops.attention import attention
from dyncp.ops.gated_delta_rule import causal_conv1d, gated_delta_rule
from dyncp.planning.methods import METHODS, Method
from dyncp.planning.planner import static_plan
from dyncp.sharding.layout import Sharding

SECONDS = 3.0


def told(call: Callable[[], object]) -> str:
    """The type and text of what a call raises."""
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def attend(
    cu: torch.Tensor | list[int] | Sharding, method: Method = "ring", group: dist.ProcessGroup | None = None
) -> torch.Tensor:
    x = torch.ones(4, 4, 4, dtype=torch.float64)
    return attention(x, x, x, cu, group or dist.group.WORLD, method)


def delta(cu: list[int]) -> torch.Tensor:
    x, gate = torch.ones(4, 2, 4, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
    return gated_delta_rule(x, x, x, gate, gate, cu, dist.group.WORLD)


def disagree() -> dict[str, str]:
    rank, out = dist.get_rank(), {}
    other_lengths = static_plan([4, 4 + rank], 2, 16, 1)
    out["plan"] = told(lambda: ProcessGroups().prepare(other_lengths))
    out["world"] = told(lambda: ProcessGroups().prepare(static_plan([4, 4], 2 + rank, 16, 1)))
    out["same plan"] = told(lambda: ProcessGroups().prepare(static_plan([4, 4], 2, 16, 1)))
    cu = [0, 5, 8] if rank else [0, 3, 8]
    for method in METHODS:
        out[method] = told(partial(attend, cu, method))
    out["methods"] = told(lambda: attend([0, 8], "ring" if rank else "ulysses"))
    out["delta rule"] = told(lambda: delta(cu))
    x, weight = torch.ones(4, 3, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    out["convolution"] = told(lambda: causal_conv1d(x, weight, None, cu, dist.group.WORLD))
    return out


def once() -> list[int]:
    """How many operations a Sharding has been compared for, after many layers of two kinds."""
    sharding, found = Sharding((0, 3, 8), 2), []
    for _ in range(3):
        attend(sharding)
        found.append(len(sharding.checked))
    x, weight = torch.ones(4, 3, dtype=torch.float64), torch.ones(3, 4, dtype=torch.float64)
    causal_conv1d(x, weight, None, sharding, dist.group.WORLD)
    return [*found, len(sharding.checked)]


def two_ranks() -> tuple[dict[str, str], list[int]]:
    return disagree(), once()


def deserted() -> tuple[float, float, str]:
    """Rank 1 stays away from its group for half as long again as ranks wait; the group's and the world's timeout."""
    groups = ProcessGroups()
    groups.prepare(static_plan([5, 5], 4, 3, 2))
    group = groups.get((0, 1) if dist.get_rank() < 2 else (2, 3))
    assert group is not None
    own = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    said = ""
    if dist.get_rank() == 0:
        said = told(lambda: attend([0, 8], group=group))
    else:
        time.sleep(1.5 * world_timeout().total_seconds())
    return own, world_timeout().total_seconds(), said


def test_ranks_that_disagree_are_told_so_on_every_rank() -> None:
    for out, compared in run_world(2, two_ranks, timeout=SECONDS):
        assert "ranks [1] hold another plan than rank 0" in out["plan"]
        assert "ranks [1] hold another plan than rank 0" in out["world"]
        assert out["same plan"] == "nothing was raised"
        for name in (*METHODS, "methods", "delta rule", "convolution"):
            assert "ranks [1] of the group cut another stream than rank 0" in out[name], name
        assert compared == [1, 1, 1, 2]


def test_groups_wait_no_longer_than_the_world() -> None:
    found = run_world(4, deserted, timeout=2 * SECONDS)
    assert {(own, world) for own, world, _ in found} == {(2 * SECONDS, 2 * SECONDS)}
    assert "Timed out" in found[0][2]
