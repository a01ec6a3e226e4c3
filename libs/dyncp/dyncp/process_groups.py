"""The process groups that plans need: made when a plan first asks, in one order on every rank, kept, and bounded."""

from collections import OrderedDict

import torch.distributed as dist

from dyncp.plan_types import DynamicPlan

Ranks = tuple[int, ...]


class ProcessGroups:
    """A cache of process groups over the default world.

    Creating a group is collective over the whole world, so `prepare` must be called by every rank with the same plan,
    before any of its steps. limit: how many groups of more than one rank and less than the world may exist at a time (a
    communicator takes device memory); the least recently planned ones are destroyed first. `dyncp.plan` takes the same
    limit and keeps to it.
    """

    def __init__(self, limit: int = 64) -> None:
        self.limit = limit
        self.created = 0
        self._groups: OrderedDict[Ranks, dist.ProcessGroup] = OrderedDict()

    def prepare(self, plan: DynamicPlan) -> None:
        """Make the plan's groups. Collective. ValueError where one plan needs more than the limit."""
        needed = [ranks for ranks in plan.process_groups() if len(ranks) < plan.world_size]
        if len(needed) > self.limit:
            raise ValueError(f"the plan needs {len(needed)} process groups, the limit is {self.limit}: raise it")
        for ranks in needed:
            if ranks in self._groups:
                self._groups.move_to_end(ranks)
                continue
            self._groups[ranks] = dist.new_group(list(ranks))
            self.created += 1
        while len(self._groups) > self.limit:
            _, oldest = self._groups.popitem(last=False)
            if oldest != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(oldest)

    def get(self, ranks: Ranks) -> dist.ProcessGroup | None:
        """The group of these ranks: None for a single rank, the default group for the whole world."""
        if len(ranks) == 1:
            return None
        if len(ranks) == dist.get_world_size():
            return dist.group.WORLD
        if ranks not in self._groups:
            raise ValueError(f"ranks {ranks} have no process group yet: call prepare(plan) on every rank first")
        return self._groups[ranks]

    def __len__(self) -> int:
        return len(self._groups)

    def close(self) -> None:
        """Destroy all groups. Collective over each group's ranks."""
        while self._groups:
            _, group = self._groups.popitem()
            if group != dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
