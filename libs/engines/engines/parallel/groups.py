"""The process groups of a layout, and meshes of ranks. Their collectives wait as long as the default group's."""

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dyncp.comm.process_groups import world_timeout
from engines.config import EngineConfig
from engines.parallel.layout import ParallelLayout
from seqpack.comm.collectives import broadcast_plain

T = TypeVar("T")

_MADE: dict[Any, dist.ProcessGroup] = {}
"""This rank's group by the ranks of all groups that were made with it; "world": of which default group."""


@dataclass(frozen=True)
class ParallelGroups:
    """A layout with its process groups, as one rank sees them.

    `plan`: the ranks that split a batch; sums of metrics and scores run over it. `pipeline`: the stages of this
    rank's pipeline. `world`: all ranks, which agree on plans, share gradient norms and write checkpoints together.
    """

    layout: ParallelLayout
    rank: int
    plan: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    world: dist.ProcessGroup

    @staticmethod
    def make(layout: ParallelLayout) -> "ParallelGroups":
        """Make the groups. Collective: every rank calls it with the same layout. ValueError for another world size."""
        layout.check_world(dist.get_world_size())
        rank, ranks = dist.get_rank(), range(layout.world_size)
        plan = _group_of(rank, sorted({layout.plan_ranks(r) for r in ranks}))
        pipeline = _group_of(rank, sorted({layout.pipeline_ranks(r) for r in ranks}))
        return ParallelGroups(layout, rank, plan, pipeline, _world())

    @property
    def plan_index(self) -> int:
        """The number of the plan's part that this rank computes."""
        return self.layout.plan_index(self.rank)

    def sum(self, values: Tensor, op: "dist.ReduceOp.RedOpType" = dist.ReduceOp.SUM) -> Tensor:
        """Reduce the last stages' values over the plan's ranks, in place, and send them to all stages."""
        if self.layout.plan_size > 1:
            dist.all_reduce(values, op=op, group=self.plan)
        return self.to_stages(values)

    def to_stages(self, values: Tensor) -> Tensor:
        """Send the last stage's values to all stages, in place."""
        if self.layout.pp > 1:
            dist.broadcast(values, src=self.layout.pipeline_ranks(self.rank)[-1], group=self.pipeline)
        return values

    def from_last_stage(self, value: T) -> T:
        """Return the last stage's value (plain data) on every stage."""
        if self.layout.pp == 1:
            return value
        result: T = broadcast_plain(value, self.layout.pipeline_ranks(self.rank)[-1], self.pipeline)
        return result


def mesh_of(device: str, sizes: tuple[int, ...], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Return the mesh of all ranks in these sizes, the last one fastest; `names` for several. Collective."""
    if len(sizes) == 1:
        return DeviceMesh.from_group(_world(), device, mesh_dim_names=names)
    ranks = torch.arange(dist.get_world_size()).view(sizes)
    groups = []
    for axis in range(len(sizes)):
        lines = ranks.movedim(axis, -1).reshape(-1, sizes[axis]).tolist()
        groups.append(_group_of(dist.get_rank(), [tuple(line) for line in lines]))
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def second_world() -> dist.ProcessGroup:
    """Return a group of all ranks over connections of its own: on a GPU its messages do not wait behind those of the
    default group. One for the process. Collective."""
    ranks = tuple(range(dist.get_world_size()))
    return _made(dist.get_rank(), ("second world", ranks), [ranks])


def refuse_other_timeout(config: EngineConfig) -> None:
    """Raise ValueError where the default group has another timeout than the settings."""
    wanted = config.collective_timeout_seconds
    if wanted is not None and world_timeout().total_seconds() != wanted:
        raise ValueError(
            f"collective_timeout_seconds={wanted}, but the process group is there already and waits "
            f"{world_timeout().total_seconds():g} s: give launch(timeout_seconds={wanted}), or leave it out"
        )


def _group_of(rank: int, every: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """Make all groups, in the same order on every rank; return the one with `rank`.

    Engines of one process share them: each holds threads and sockets, on CUDA a communicator.
    """
    world = _world()
    return world if len(every) == 1 else _made(rank, tuple(every), every)


def _made(rank: int, key: Any, every: list[tuple[int, ...]]) -> dist.ProcessGroup:
    """Make all groups unless the process has them by this key; return the one with `rank`."""
    world = _world()
    if _MADE.get("world") is not world:  # another default group: torch destroyed those of the one before with it
        _MADE.clear()
        _MADE["world"] = world
    if key not in _MADE:
        waits = world_timeout()  # torch's own time otherwise, whatever the world's is
        groups = [dist.new_group(list(ranks), timeout=waits) for ranks in every]
        _MADE[key] = next(group for group, ranks in zip(groups, every, strict=True) if rank in ranks)
    result: dist.ProcessGroup = _MADE[key]
    return result


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None, "the default process group is there by now"
    return world
