"""Experts over several copies of a model on a CPU: what vLLM lacks there, and how the copies step together.

Every layer with experts is an exchange between all copies, so that all make each step at once, a dummy one where a
copy has nothing to do. vLLM (0.32) has all of it but two exchanges of its communicator for CPUs, which are ours.
"""

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch import Tensor

from rollout.vllm.server.ragged_collectives import gather_rows, sum_rows

VERSIONS = ">=0.32.0,<0.33"
"""Versions of vLLM that this was written for."""
MISSING_COLLECTIVES = ("all_gatherv", "reduce_scatterv")


def refusal(version: str, cpu: bool) -> str | None:
    """Return why this vLLM can't spread a model's experts over several copies of it; None where it can."""
    if not cpu:
        return (
            "experts over copies of the model (experts_over_copies) ran on a CPU alone, no accelerator has run it: "
            "leave it off, and each copy has all experts over its own workers"
        )
    if not SpecifierSet(VERSIONS).contains(version, prereleases=True):
        return (
            f"experts over copies of the model (experts_over_copies) on a CPU were written for vLLM {VERSIONS}, and "
            f"{version} is installed: install one of these versions, or leave it off"
        )
    return None


def variables(together: Mapping[str, int]) -> dict[str, str]:
    """Return the variables that make vLLM one of several copies. `together`: its `rank`, their `size`, the first of two
    `port`s."""
    return {
        "VLLM_DP_RANK": str(together["rank"]),
        "VLLM_DP_RANK_LOCAL": str(together["rank"]),
        "VLLM_DP_SIZE": str(together["size"]),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(together["port"]),
        "GLOO_SOCKET_IFNAME": "lo",  # all of them are on this machine
    }


def patch_collectives(communicators: Sequence[Any], base: type) -> Callable[[], None]:
    """Add to vLLM's communicators the collectives of uneven rows that it has for accelerators alone; return an undo.

    Only these objects change, not their class. A communicator with a collective of its own, which `base`, vLLM's class
    of all communicators, only names, keeps it.
    """
    lent = []
    for one in communicators:
        for name, ours in zip(MISSING_COLLECTIVES, (_all_gatherv, _reduce_scatterv), strict=True):
            if getattr(type(one), name) is getattr(base, name):
                setattr(one, name, types.MethodType(ours, one))
                lent.append((one, name))

    def undo() -> None:
        for one, name in lent:
            delattr(one, name)

    return undo


def _all_gatherv(
    self: Any, input_: Tensor | list[Tensor], dim: int = 0, sizes: list[int] | None = None
) -> Tensor | list[Tensor]:
    """Gather the rows of all ranks, of a tensor or of each of a list, as vLLM does for accelerators."""
    parts = [input_] if isinstance(input_, Tensor) else input_
    _refuse_other_dimensions(dim)
    gathered = gather_rows(parts, sizes or [parts[0].shape[0]] * self.world_size, self.device_group)
    return gathered[0] if isinstance(input_, Tensor) else gathered


def _reduce_scatterv(self: Any, input_: Tensor, dim: int = -1, sizes: list[int] | None = None) -> Tensor:
    """Return the sums of this rank's rows, as vLLM does for accelerators."""
    _refuse_other_dimensions(dim)
    return sum_rows(input_, sizes or [input_.shape[0] // self.world_size] * self.world_size, self.device_group)


def _refuse_other_dimensions(dim: int) -> None:
    if dim != 0:
        raise ValueError(f"rows are exchanged, dimension 0, got {dim}")


@dataclass(frozen=True)
class LockstepTurn:
    """The shared knowledge of all copies after they have met."""

    busy: bool
    """Whether any copy has requests, so that all make a step."""
    agreed: int
    """Number of the last message that all copies have received: all obey it, and those before it."""
    latest: int
    """Number of the last message that any copy has received."""


class LockstepTurns:
    """Meetings of the copies before each step, so that none makes one alone. `group`: all copies, over gloo."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def meet(self, busy: bool, seen: int) -> LockstepTurn:
        """Share whether this copy has requests and its last message; return what all copies know then."""
        shared = torch.tensor([int(busy), -seen, seen])
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._group)
        some, agreed, latest = shared.tolist()
        return LockstepTurn(bool(some), -agreed, latest)
