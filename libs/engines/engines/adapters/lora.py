"""Adapters in a live model: two small matrices beside the weight of a linear layer, y = W x + scale * B (A x).

They are parameters of the linear layer itself, so that it keeps its name and class: families, sharding, packing,
reading from disk and exports see the model they know, with some parameters more. (peft wraps each layer in one of its
own, which renames every weight under it.)

1. `add_adapters` gives the layers their parameters, before sharding: no values yet.
2. `reset_adapters` fills them after sharding, A at random and B with zeros: the same whatever the number of ranks.
3. Everything else is frozen, in the dtype of the checkpoint.

Invariants, each with a test: log-probs and the gradients of A and B are those of peft; without its adapters the model
is the base, bit for bit; merged weights are those of peft.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn import functional

from engines.adapters.stacked import adapted_stacks, add_stacked
from engines.families.registry import family_of
from engines.lora_config import LoraConfig
from engines.weights.model_weights import ModelWeights, live_tensors
from seqpack.adapters.subclasses import set_mixin, stock_class

PARTS = ("lora_A", "lora_B")
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")


def is_adapter(name: str) -> bool:
    """Return whether a parameter of this name belongs to an adapter."""
    last = name.rpartition(".")[2]
    return last in PARTS or last.endswith(("_lora_A", "_lora_B"))


def add_adapters(model: Any, config: LoraConfig, weights: ModelWeights, dtype: torch.dtype) -> tuple[str, ...]:
    """Add adapters of this dtype to a model, and freeze the rest in the dtypes that it has on disk.

    Returns the names of the linear layers that have one now. ValueError for a target that is no linear layer of the
    decoder, or a rank that is larger than a layer; for experts as `engines.adapters.stacked`.
    """
    chosen = adapted_layers(model, config)
    _keep_dtypes(model, weights)
    model.requires_grad_(False)
    for module in chosen.values():
        options: dict[str, Any] = {"dtype": dtype, "device": module.weight.device}
        module.lora_A = nn.Parameter(torch.zeros(config.rank, module.in_features, **options))
        module.lora_B = nn.Parameter(torch.zeros(module.out_features, config.rank, **options))
        module.lora_scale, module.lora_on = config.scale, True
        set_mixin(module, LowRankLinear)
    add_stacked(model, config, dtype)
    return tuple(chosen)


def adapted_layers(model: Any, config: LoraConfig) -> dict[str, Any]:
    """Return the linear layers that are to have adapters, by name; ValueError as `add_adapters`."""
    adapted_stacks(model, config)
    layers = linear_layers(model)
    for target in config.targets:
        if target not in {name.rpartition(".")[2] for name in layers}:
            known = sorted({name.rpartition(".")[2] for name in layers})
            raise ValueError(f"lora targets: there is no linear layer {target!r} in this model, but {', '.join(known)}")
    chosen = {n: m for n, m in layers.items() if not config.targets or n.rpartition(".")[2] in config.targets}
    for name, module in chosen.items():
        smallest = min(module.in_features, module.out_features)
        if config.targets and config.rank > smallest:
            raise ValueError(f"lora rank {config.rank} is larger than {name}, which has {smallest} features")
    return chosen


def linear_layers(model: Any) -> dict[str, Any]:
    """Return the linear layers of the decoder that can have adapters, by name: attention, delta nets and MLPs.

    Not the head. Of a family with experts no MLP: routed experts are no layers of their own, and peft would take a
    shared expert's names for theirs.
    """
    family = family_of(model.config)
    inside = {module for layer in family.layers(model) for module in layer.modules()}
    linears = {name: m for name, m in model.named_modules() if stock_class(m) is nn.Linear and m in inside}
    return {n: m for n, m in linears.items() if not family.routed or n.rpartition(".")[2] not in _OF_EXPERTS}


def set_trainable(model: nn.Module, trainable: bool) -> None:
    """Turn gradients on for the adapters where there are any, else for all parameters."""
    adapters = [parameter for name, parameter in model.named_parameters() if is_adapter(name)]
    for parameter in adapters or model.parameters():
        parameter.requires_grad_(trainable)


@torch.no_grad()
def reset_adapters(model: nn.Module, seed: int) -> None:
    """Fill adapters, whole or sharded, as peft does: A uniform (Kaiming, a = sqrt 5), B zero. Collective."""
    for name, parameter in model.named_parameters():
        if not is_adapter(name):
            continue
        full = initial_values(name, parameter.shape, seed)
        if isinstance(parameter, DTensor):
            full = full.to(parameter.device, parameter.dtype)
            parameter.copy_(distribute_tensor(full, parameter.device_mesh, parameter.placements))
        else:
            parameter.copy_(full)


def initial_values(name: str, shape: Sequence[int], seed: int) -> Tensor:
    """Return the first values of an adapter's parameter, whole: a function of its name and the seed alone."""
    full = torch.zeros(tuple(shape))
    if name.endswith("lora_A"):
        own = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest(), "big")
        full.uniform_(-1, 1, generator=torch.Generator().manual_seed(own)).div_(math.sqrt(full.shape[-1]))
    return full


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Switch the adapters off inside the block: the model is the base alone. ValueError where there is no adapter."""
    adapted: list[Any] = [module for module in model.modules() if hasattr(module, "lora_on")]
    if not adapted:
        raise ValueError("the model has no adapters: it is no base of its own")
    for module in adapted:
        module.lora_on = False
    try:
        yield
    finally:
        for module in adapted:
            module.lora_on = True


def merged_tensors(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of the model without adapters, each with its adapter added, whole and in `dtype`. Collective.

    Sums are taken in `dtype`; a buffer keeps its own.
    """
    for name, tensor in live_tensors(model).items():
        if is_adapter(name):
            continue
        module: Any = model.get_submodule(name.rpartition(".")[0])
        full = whole(tensor)
        if isinstance(tensor, nn.Parameter):
            full = full.to(dtype)
        if (pair := _pair_of(module, name.rpartition(".")[2])) is not None:
            a, b = (whole(part).to(dtype) for part in pair)
            full = full + (b @ a) * module.lora_scale
        yield name, full.detach()


def _pair_of(module: Any, parameter: str) -> tuple[Tensor, Tensor] | None:
    """Return A and B of a module's parameter; None where it has no adapter."""
    before = "" if parameter == "weight" else f"{parameter}_"
    a, b = (getattr(module, f"{before}{part}", None) for part in PARTS)
    return None if a is None or b is None else (a, b)


def whole(tensor: Tensor) -> Tensor:
    """Gather a tensor from its shards."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class LowRankLinear(nn.Module):
    """The class of a linear layer that has an adapter, before its stock class."""

    lora_A: Tensor  # noqa: N815  (peft's name)
    lora_B: Tensor  # noqa: N815
    lora_scale: float
    lora_on: bool

    def forward(self, x: Tensor) -> Tensor:
        """Return W x, with scale * B (A x) where the adapter is on."""
        out: Tensor = super().forward(x)
        if not self.lora_on:
            return out
        low = functional.linear(x.to(self.lora_A.dtype), self.lora_A)
        return out + (functional.linear(low, self.lora_B) * self.lora_scale).to(out.dtype)


def _keep_dtypes(model: Any, weights: ModelWeights) -> None:
    """Cast parameters to their dtypes in the checkpoint; this is exact, as their values came from there."""
    for name, parameter in model.named_parameters():
        (first, *_) = weights.names.parts(name, parameter.shape)
        parameter.data = parameter.data.to(weights.dtypes[first.name])
