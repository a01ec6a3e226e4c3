"""One short exchange that turns a plan on which ranks disagree into an error instead of a hang."""

import torch
import torch.distributed as dist

from dyncp.comm.collectives import gathered
from dyncp.planning.types import DynamicPlan


def check_same_plan(plan: DynamicPlan, group: dist.ProcessGroup | None = None) -> None:
    """ValueError on every rank, naming the odd ones, unless all hold a plan of the same hash. Eight bytes a rank."""
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    world = dist.get_world_size(group)
    if world != plan.world_size:
        raise ValueError(f"the plan is for {plan.world_size} ranks, this process group has {world}")
    number = int.from_bytes(bytes.fromhex(plan.hash), "big", signed=True)
    mine = torch.tensor([number], dtype=torch.int64, device=communication_device(group))
    hashes = gathered(mine, group).tolist()
    common = max(set(hashes), key=lambda value: (hashes.count(value), -hashes.index(value)))
    odd = [rank for rank, value in enumerate(hashes) if value != common]
    if odd:
        raise ValueError(
            f"ranks {odd} hold another plan than rank {hashes.index(common)}: plan from the same lengths, world size, "
            "cap, cost model and layout on every rank"
        )


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """The device whose tensors this group's collectives take."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    if dist.get_backend(group) == "hccl":
        return torch.device("npu", torch.get_device_module("npu").current_device())
    return torch.device("cpu")
