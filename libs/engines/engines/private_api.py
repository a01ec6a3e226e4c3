"""Private names of torch, transformers and megatron-core that engines uses: what a new version may break is here.

Replacements of functions in other packages are `engines.devices.adaptations`, each for the versions that it names.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor._utils import (
    compute_local_shape_and_global_offset as compute_local_shape_and_global_offset,
)
from torch.utils._python_dispatch import is_traceable_wrapper_subclass as is_traceable_wrapper_subclass

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


def init_weights(model: Any, module: nn.Module) -> None:
    """Fill a module of a transformers model as a new model's."""
    model._init_weights(module)


def set_experts(config: Any, name: str) -> None:
    """Let a transformers config ask for this implementation of experts."""
    config._experts_implementation = name


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
