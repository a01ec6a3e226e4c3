"""The process groups of plans: made when a plan first needs them, in one order on every rank, cached and bounded."""

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from dyncp.comm.plan_hash import check_same_plan, communication_device
from dyncp.planning.types import DynamicPlan
from dyncp.private_api import timeout_of

Ranks = tuple[int, ...]


class ProcessGroups:
    """A cache of process groups over the default world.

    Creating a group is collective over the whole world, so `prepare` must be called by every rank with the same plan,
    before any of its steps. limit: how many groups any one rank may be in at a time, the world not counted (each holds
    device memory); the least recently planned ones are destroyed first, the same on every rank. `Topology.max_groups`
    is the planner's limit for one plan.

    planes: sets of global ranks that each obey the same plan, whose rank i is plane[i] (such as the stages of a
    pipeline), and every rank of the world is in one; `plane` is the group of this rank's. The world itself where None.
    """

    def __init__(
        self, limit: int = 32, planes: Sequence[Ranks] | None = None, plane: dist.ProcessGroup | None = None
    ) -> None:
        self.limit = limit
        self.planes = planes
        self.plane = plane
        self.created = 0
        self._groups: OrderedDict[Ranks, dist.ProcessGroup] = OrderedDict()

    def prepare(self, plan: DynamicPlan) -> None:
        """Check that all ranks hold this plan, and make its groups with the world's timeout. Collective.

        ValueError on every rank where plans differ, and where the plan needs more groups than the limit.
        """
        check_same_plan(plan, self.plane)
        needed = [ranks for ranks in plan.process_groups() if len(ranks) < plan.world_size]
        rank, most = _busiest(needed)
        if most > self.limit:
            raise ValueError(
                f"the plan needs {most} process groups on rank {rank}, the limit is {self.limit}: raise it"
            )
        timeout = world_timeout() if needed else None
        for ranks in needed:
            if ranks in self._groups:
                self._groups.move_to_end(ranks)
                continue
            self._groups[ranks] = self._make(ranks, timeout)
            self.created += 1
        rank, most = _busiest(self._groups)
        while most > self.limit:
            self._destroy(next(ranks for ranks in self._groups if rank in ranks))
            rank, most = _busiest(self._groups)

    def _make(self, ranks: Ranks, timeout: timedelta | None) -> dist.ProcessGroup:
        """Make the group on every plane; return this rank's, or NON_GROUP_MEMBER for a rank outside of it."""
        if self.planes is None:
            alone: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timeout)
            return alone
        made = [dist.new_group([plane[rank] for rank in ranks], timeout=timeout) for plane in self.planes]
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        result: dist.ProcessGroup = next((group for group in made if group != outside), outside)
        return result

    def _destroy(self, ranks: Ranks) -> None:
        group = self._groups.pop(ranks)
        outside: Any = dist.GroupMember.NON_GROUP_MEMBER
        if group != outside:
            dist.destroy_process_group(group)

    def get(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """Return the group of these ranks of a plan: None for one rank, the plane's (the world's) for all ranks."""
        if len(ranks) == 1:
            return None
        if len(ranks) == dist.get_world_size(self.plane):
            return self.plane or dist.group.WORLD
        if ranks not in self._groups:
            raise ValueError(f"ranks {ranks} have no process group yet: call prepare(plan) on every rank first")
        return self._groups[ranks]

    def __len__(self) -> int:
        return len(self._groups)

    def close(self) -> None:
        """Destroy all groups. Collective over each group's ranks."""
        for ranks in list(self._groups):
            self._destroy(ranks)


def world_timeout() -> timedelta:
    """Return the timeout of the default group's collectives, as passed to `init_process_group(timeout=...)`."""
    world = dist.group.WORLD
    assert world is not None, "the default group is initialised"
    return timeout_of(world, communication_device())


def _busiest(groups: Iterable[Ranks]) -> tuple[int, int]:
    """Return (rank, number of its groups) for the rank that is in most groups; the lowest of several."""
    counts = Counter(rank for ranks in groups for rank in ranks)
    return max(counts.items(), key=lambda item: (item[1], -item[0]), default=(0, 0))
