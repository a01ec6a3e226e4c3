"""The weights in this process's memory, for a sampler beside the trainer that computes with these very tensors.

It is exact where a rank holds every tensor whole, in the compute dtype: shards of one rank in that dtype, or replicated
weights. Elsewhere nothing can be shared, and a sampler gets copies (`Engine.export_weights`). Every update writes into
the tensors: who shares them has the new weights as soon as a step is made, and cannot get the old ones back.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.capability import Unsupported
from engines.dtypes import compute_dtype
from engines.mtp.head import is_of_head
from engines.nonfinite import finite_tensors
from engines.weights.row_shards import sharding_axes


class SharedParameters(NamedTuple):
    """`tensors`: views of parameters (tied ones once) and persistent buffers, whole, by the names of the live module.

    `updates()`: a number that changes whenever the engine has changed their values (by a step, or by loading a
    checkpoint of another step).
    """

    tensors: Mapping[str, Tensor]
    updates: Callable[[], int]


def shared_parameters(engine: Any) -> SharedParameters | Unsupported:
    """Return the engine's weights in place, under the names of `export_weights(live=True)`; or why they can't be lent.

    All ranks call it after each update, as they would export: replicated weights may be on their way between ranks
    until then, and moving the engine (`offload`, `onload`) gives it other tensors. `NonFiniteError` names a tensor that
    is not finite, as an export does.
    """
    if engine.config.backend != "fsdp2":
        return Unsupported(
            "Megatron lays weights out in a way of its own, joined and cut: they are put together for an export"
        )
    if engine.config.lora.rank:
        return Unsupported("adapters lie beside the weights, and are added to them for a sampler alone")
    if engine._offloaded:
        return Unsupported("the engine is offloaded: its weights are in host memory")
    dtype = compute_dtype(engine.config, engine.device)
    model = engine.executor.model
    tensors = {name: tensor for name, tensor in engine.executor.held().items() if not is_of_head(model, name)}
    reason = next(_reasons(tensors.items(), dtype, engine.device), None)
    if reason is not None:
        return Unsupported(reason)
    lent = {name: _local(tensor) for name, tensor in tensors.items()}
    return SharedParameters(dict(finite_tensors(lent.items())), lambda: int(engine.step))


def _reasons(held: Iterable[tuple[str, Tensor]], dtype: torch.dtype, device: torch.device) -> Iterator[str]:
    """Yield why a sampler of this dtype, on this device, cannot compute with a rank's tensors."""
    wanted = _named(dtype)
    for name, tensor in held:
        if isinstance(tensor, DTensor):
            ranks = max((tensor.device_mesh.size(axis) for axis in sharding_axes(tensor)), default=1)
            if ranks > 1:
                yield f"{ranks} ranks share the weights, each has a part of {name}"
                continue
        own = _local(tensor)
        if own.is_floating_point() and own.dtype != dtype:
            yield f"weights are {_named(own.dtype)}, and {wanted} is computed with"
        elif own.device != device:
            yield f"{name} is kept on {own.device}, and {device} computes"
        elif tuple(own.shape) != tuple(tensor.shape) or not own.is_contiguous():
            yield f"{name} does not lie in memory as a module's would"


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in place, without a gradient."""
    with torch.no_grad():
        return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor.detach()


def _named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
