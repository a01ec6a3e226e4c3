"""Stages with megatron-core's gradient buffers, which sum gradients and never average them."""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from torch import Tensor


def with_buffers(stages: Sequence[Any], settings: Any, distributed_optimizer: bool) -> list[Any]:
    """Return the stages in their buffers. `settings`: their TransformerConfig, which gets what ends a schedule."""

    def finalize(model: list[Any], _: Tensor | None = None, **options: Any) -> None:
        finalize_model_grads(model, None, **options)

    settings.finalize_model_grads_func = finalize
    buffers = DistributedDataParallelConfig(
        grad_reduce_in_fp32=settings.params_dtype == torch.bfloat16,
        overlap_grad_reduce=False,
        use_distributed_optimizer=distributed_optimizer,
    )
    return [DistributedDataParallel(settings, buffers, stage) for stage in stages]
