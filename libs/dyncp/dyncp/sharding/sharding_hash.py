"""One short exchange that turns streams on which ranks of a group disagree into an error instead of wrong numbers."""

import hashlib

import torch
import torch.distributed as dist

from dyncp.comm.collectives import gathered
from dyncp.comm.plan_hash import communication_device, odd_ranks
from dyncp.private_api import assert_async
from dyncp.sharding.layout import Sharding


def check_same_sharding(sharding: Sharding, group: dist.ProcessGroup, operation: str) -> None:
    """Raise ValueError on every rank of the group unless all cut one stream alike and run one operation.

    Collective, eight bytes a rank, once for each Sharding object and operation: make one Sharding a micro-batch, as
    `shard` does, and all layers share its check. On an accelerator nobody waits for the answer: a difference there is a
    failed device assertion. operation: such as "attention by ring".
    """
    key = (group.group_name, operation)
    if key in sharding.checked:
        return
    facts = repr((sharding.bounds, sharding.cp_size, sharding.layout, operation)).encode()
    number = int.from_bytes(hashlib.blake2b(facts, digest_size=8).digest(), "big", signed=True)
    device = communication_device(group)
    mine = torch.tensor([number], device=device)
    numbers = gathered(mine, group)
    if device.type == "cuda":
        assert_async((numbers == mine).all(), f"{operation}: the ranks of a group hold different cu_seqlens")
    else:
        odd, common = odd_ranks(numbers.tolist())
        if odd:
            raise ValueError(
                f"{operation}: ranks {odd} of the group cut another stream than rank {common}, or cut it otherwise; "
                f"this one has cu_seqlens {_short(sharding.bounds)} in {sharding.layout}: give all ranks the same"
            )
    sharding.checked.add(key)


def _short(bounds: tuple[int, ...]) -> str:
    return str(list(bounds)) if len(bounds) <= 8 else f"[{bounds[0]}, {bounds[1]}, ..., {bounds[-1]}]"
