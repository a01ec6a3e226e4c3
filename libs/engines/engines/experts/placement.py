"""The placement of experts over ranks, under FSDP2 with expert parallelism.

The ranks form a second mesh, ("rows", "experts"), expert ranks next to each other. The weights of a layer's experts,
[E, out, in], are sharded along E over "experts" for good, and along `out` over "rows", which FSDP2 gathers for a call
as it gathers other weights over all ranks. So every element has one owner: gradients, summed over "rows" by FSDP2 and
over "experts" by the tokens that came from there, are whole; norms, checkpoints and exports see plain shards.
"""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from engines.experts.expert_exchange import WEIGHTS, ExpertExchange
from engines.families.registry import family_of
from engines.parallel.groups import mesh_of
from seqpack.adapters.subclasses import stock_class

ROWS, EXPERTS = "rows", "experts"


def expert_modules(model: Any) -> list[nn.Module]:
    """Return the modules of experts of all layers, in order."""
    family = family_of(model.config)
    return [m for layer in family.layers(model) for m in layer.modules() if type(m).__name__ == family.experts]


def place_experts(model: Any, ranks: int, device: str) -> tuple[list[nn.Module], DeviceMesh]:
    """Keep this rank's experts alone, and route tokens to them; return the modules, and the mesh to shard them over.

    `ranks` share the experts of a layer. Collective. ValueError for a model without experts, or sizes that do not
    divide.
    """
    rows = dist.get_world_size() // ranks
    check_sizes(model, ranks, rows)
    mesh = mesh_of(device, (rows, ranks), (ROWS, EXPERTS))
    modules = expert_modules(model)
    for module in modules:
        stock: Any = stock_class(module).forward  # before FSDP2 gives the module another class
        number = getattr(module, WEIGHTS[0]).shape[0]
        for name in WEIGHTS:
            _keep_own(module, name, mesh[EXPERTS])
        module.forward = ExpertExchange(module, stock, number, mesh[EXPERTS].get_group())
    return modules, mesh[ROWS]


def check_sizes(model: Any, ranks: int, rows: int) -> None:
    """Raise ValueError unless `ranks` can share the experts of this model, and `rows` ranks each of their matrices."""
    modules, kind = expert_modules(model), model.config.get_text_config().model_type
    if not modules:
        raise ValueError(f"expert_parallel is for models with experts, {kind} has none: leave it at 1")
    for module in modules:
        weights: list[Any] = [getattr(module, name) for name in WEIGHTS]
        if weights[0].shape[0] % ranks:
            raise ValueError(
                f"expert_parallel={ranks} ranks cannot share {weights[0].shape[0]} experts evenly: choose a divisor"
            )
        for weight in weights:
            if weight.shape[1] % rows:
                raise ValueError(
                    f"{rows} ranks cannot share {weight.shape[1]} rows of an expert's matrix evenly: raise "
                    "expert_parallel, or start another number of processes"
                )


def _keep_own(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Replace a weight by the slice of this rank."""
    whole: Any = getattr(module, name)
    own = whole.detach().chunk(mesh.size())[mesh.get_local_rank()].clone()
    shared = DTensor.from_local(own, mesh, [Shard(0)], run_check=False)
    setattr(module, name, nn.Parameter(shared, requires_grad=whole.requires_grad))
