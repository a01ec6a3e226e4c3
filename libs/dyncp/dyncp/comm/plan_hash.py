"""One short exchange that turns a plan on which ranks disagree into an error instead of a hang."""

import torch
import torch.distributed as dist

from dyncp.comm.collectives import gathered
from dyncp.planning.types import DynamicPlan


def check_same_plan(plan: DynamicPlan, group: dist.ProcessGroup | None = None) -> None:
    """Raise ValueError on every rank, naming the odd ones, unless all hold a plan of one hash, made for this world.

    Collective over `group`, eight bytes a rank; a rank that never calls it makes the others raise after the group's
    timeout. `ProcessGroups.prepare` calls it.
    """
    if not dist.is_initialized():
        if plan.world_size > 1:
            raise ValueError(f"the plan is for {plan.world_size} ranks, and torch.distributed is not initialised")
        return
    world = dist.get_world_size(group)
    hashes = gathered_numbers(int.from_bytes(bytes.fromhex(plan.hash), "big", signed=True), group)
    odd, common = odd_ranks(hashes)
    if odd:
        raise ValueError(
            f"ranks {odd} hold another plan than rank {common}: plan from the same lengths, world size, "
            "cap, alignment, cost model and layout on every rank"
        )
    if world != plan.world_size:
        raise ValueError(f"the plan is for {plan.world_size} ranks, this process group has {world}")


def gathered_numbers(number: int, group: dist.ProcessGroup | None) -> list[int]:
    """Return every rank's 64-bit number, in rank order. Collective; it waits for the device."""
    return gathered(torch.tensor([number], device=communication_device(group)), group).tolist()


def odd_ranks(numbers: list[int]) -> tuple[list[int], int]:
    """Return (ranks whose number is not the most common one, the first rank whose number is)."""
    common = max(set(numbers), key=lambda value: (numbers.count(value), -numbers.index(value)))
    return [rank for rank, value in enumerate(numbers) if value != common], numbers.index(common)


def communication_device(group: dist.ProcessGroup | None = None) -> torch.device:
    """Return the device whose tensors this group's collectives take."""
    if dist.get_backend(group) == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    if dist.get_backend(group) == "hccl":
        return torch.device("npu", torch.get_device_module("npu").current_device())
    return torch.device("cpu")
