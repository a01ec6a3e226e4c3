"""Which ranks shard the weights: all of them, or in hybrid sharding (HSDP) those of each of several groups.

A group's ranks are neighbours, so that the gathers of every layer stay within a machine. Its copy of the weights equals
those of the other groups, and gradients are summed over the groups once a step.
"""

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from engines.config import EngineConfig
from engines.devices.detect import devices_of
from engines.parallel.configured_layout import shards_of
from engines.parallel.groups import mesh_of
from engines.weights.row_shards import sharding_axes

T = TypeVar("T")

COPIES, SHARDS = "copies", "shards"


def weight_mesh(config: EngineConfig, device: str) -> DeviceMesh:
    """Return the mesh that weights are sharded over: (ranks,), or (copies, ranks of each). Collective."""
    ranks = dist.get_world_size()
    shards = shards_of(config, ranks)
    if shards == ranks:
        return mesh_of(device, (ranks,))
    return mesh_of(device, (ranks // shards, shards), (COPIES, SHARDS))


def lies_whole(config: EngineConfig, model: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether weights need no FSDP2: one process has all of them, on the CPU, in the compute dtype.

    There FSDP2's copies and hooks save no memory, and slow a small model's step down. `weights="sharded"` uses them all
    the same, and so does a setting that is FSDP2's own.
    """
    alone = dist.get_world_size() == 1 and device.type == "cpu"
    sharded = config.weights == "sharded" or config.parameters_on_host or not config.reshard_after_forward
    return alone and not sharded and all(one.dtype == dtype for one in model.parameters())


def move_buffers(module: nn.Module, device: torch.device) -> None:
    """Move the buffers to a device, without the parameters, which FSDP2 moves."""
    for one in module.modules():
        for name, buffer in one.named_buffers(recurse=False):
            setattr(one, name, buffer.to(device))


def copies_in(mesh: DeviceMesh) -> int:
    """Return how many copies of the weights there are."""
    return mesh.size() // mesh.size(-1)


class SumAcrossCopies:
    """The sum of a sharded module's gradients over the copies of the weights, once a step, with its last backward pass.

    Until then each group keeps its own sum. FSDP2 cannot drop such a sum, so that no step can follow one which an error
    ended in the middle.
    """

    def __init__(self, module: FSDPModule) -> None:
        self.module = module
        self._kept = False

    def each(self, scored: Iterable[T], count: int) -> Iterator[T]:
        """Yield the `count` micro-batches of a step. RuntimeError where an error ended the step before."""
        if self._kept:
            raise RuntimeError(
                "an error ended the step before, and its gradients wait to be added up across the copies of "
                "shard_ranks: build the engine anew and load a checkpoint"
            )
        last = count - 1
        self._kept = last > 0
        for number, one in enumerate(scored):
            self.module.set_requires_all_reduce(number == last)
            yield one
        self._kept = False


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole, on the device; where this rank's shard is all of it, nothing is gathered or copied."""
    if not isinstance(tensor, DTensor):
        return tensor
    cut = any(tensor.device_mesh.size(axis) > 1 for axis in sharding_axes(tensor))
    near: Any = tensor.to(devices_of(tensor.device_mesh.device_type).current())  # it may be kept on the host
    result: Tensor = near.full_tensor() if cut else near.to_local()
    return result
