"""Private names of Python, torch, transformers, megatron-core and mbridge in engines: a new version may break these.

Replacements of functions in other packages are `engines.devices.adaptations`, each for the versions that it names.
"""

import copy
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

current_frames = sys._current_frames
foreach_add = torch._foreach_add_
foreach_copy = torch._foreach_copy_
foreach_mul = torch._foreach_mul_
foreach_norm = torch._foreach_norm
flash_attention_forward = torch.ops.aten._flash_attention_forward
flash_attention_backward = torch.ops.aten._flash_attention_backward


def replace_tensors(module: nn.Module, take: Callable[[Tensor], Tensor]) -> None:
    """Replace parameters and buffers as `Module.to` does, by copies that have arrived already."""
    module._apply(take)


def empty_wrapper(kind: Any, shape: Sequence[int], like: Tensor) -> Any:
    """Return a tensor of a subclass that has a shape, and dtype and device of another, and no memory."""
    return torch.Tensor._make_wrapper_subclass(kind, shape, dtype=like.dtype, device=like.device)


def compiled_graphs() -> int:
    """Return how many graphs this process has compiled so far."""
    from torch._dynamo.utils import counters  # the compiler itself, which a CPU run never loads

    return int(counters["stats"]["unique_graphs"])


def mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Mark a dimension as one whose size changes from call to call; once for each tensor."""
    if not hasattr(tensor, "_dynamo_dynamic_indices"):
        torch._dynamo.mark_dynamic(tensor, dimension)


def maybe_mark_dynamic(tensor: Tensor, dimension: int) -> None:
    """Mark a dimension as `mark_dynamic` does, where a graph that takes it for a constant is no error."""
    if not hasattr(tensor, "_dynamo_weak_dynamic_indices"):
        torch._dynamo.maybe_mark_dynamic(tensor, dimension)


def init_weights(model: Any, module: nn.Module) -> None:
    """Fill a module of a transformers model as a new model's."""
    model._init_weights(module)


def set_experts(config: Any, name: str) -> None:
    """Let a transformers config ask for this implementation of experts."""
    config._experts_implementation = name


def experts_of(config: Any) -> str | None:
    """Return the implementation of experts that a transformers config asks for; None where it asks for none."""
    name: str | None = getattr(config, "_experts_implementation", None)
    return name


def conversions_of(model: Any) -> list[Any] | None:
    """Return the conversions of weights that transformers remembered while it loaded a model; None: it loaded none."""
    conversions: list[Any] | None = getattr(model, "_weight_conversions", None)
    return conversions


def attention_function(config: Any) -> str:
    """Return the name of the attention function that a transformers model of this config chose."""
    return str(config.get_text_config()._attn_implementation)


def megatron_groups() -> list[Any]:
    """Return the process groups that megatron-core made."""
    from megatron.core import parallel_state

    return [group for group in parallel_state._global_process_group_list or () if group is not None]


def wrap_checkpointing(layer: Any, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the function by which a transformers layer recomputes itself."""
    layer._gradient_checkpointing_func = wrap(layer._gradient_checkpointing_func)


def with_own_children(module: Any) -> Any:
    """Return a copy of a module that shares its tensors, and whose children can be replaced alone."""
    other = copy.copy(module)
    other._modules = dict(module._modules)
    return other


def dispatch_parts(dispatcher: Any) -> list[Any]:
    """Return the objects that a dispatcher of megatron-core's keeps tensors in: itself, and DeepEP's manager."""
    return [part for part in (dispatcher, getattr(dispatcher, "_comm_manager", None)) if part is not None]


def load_group_bases() -> None:
    """Import the base class of torch's process groups: pybind11 has to know it before a library derives one."""
    import_module("torch._C._distributed_c10d")


def register_device(name: str, module: Any) -> None:
    """Let `torch.NAME` be the module of a device."""
    torch._register_device_module(name, module)


MAPPINGS_GATHER = "_gather_along_first_dim"
MAPPINGS_REDUCE_SCATTER = "_reduce_scatter_along_first_dim"
DISPATCHER_TO_HOST = "_maybe_dtoh_and_synchronize"
"""Names of megatron-core's that `engines.megatron.runtime.cuda_calls` replaces on devices other than CUDA."""


def bridge_class(model_type: str, tied: Mapping[str, str], fused: Mapping[str, str]) -> Any:
    """Return mbridge's class for a model type, with `tied` beside its names, and names with `fused` parts replaced."""
    kind = import_module("mbridge.core.bridge")._MODEL_REGISTRY[model_type]  # only here: it need not be installed

    class OwnTables(kind):  # type: ignore[misc,valid-type]
        _DIRECT_MAPPING: ClassVar[dict[str, str]] = {**kind._DIRECT_MAPPING, **tied}

        def _weight_name_mapping_mcore_to_hf(self, name: str) -> list[str]:
            for part, other in fused.items():
                name = name.replace(part, other)
            names: list[str] = super()._weight_name_mapping_mcore_to_hf(name)
            return names

    return OwnTables


def bridge_names(bridge: Any, stage: nn.Module) -> Mapping[str, str]:
    """Return mbridge's names in the whole model by those of a stage."""
    names: Mapping[str, str] = bridge._weight_name_mapping_mcore_local_to_global(stage)
    return names


def bridge_disk_names(bridge: Any, name: str) -> list[str]:
    """Return the names on disk of the tensors that make a parameter of mbridge's."""
    names: list[str] = bridge._weight_name_mapping_mcore_to_hf(name)
    return names


def bridge_split(bridge: Any, name: str, tensors: Iterable[Tensor], like: Tensor, tp: int) -> list[Tensor]:
    """Return the tensor-parallel ranks' parts of a parameter, once mbridge has joined the tensors that make it."""
    joined = bridge._weight_to_mcore_format(name, tensors)
    parts: list[Tensor] = bridge._weight_split_across_tp(name, joined, like, tp)
    return parts
