"""Stages with megatron-core's gradient buffers, which sum gradients and never average them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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


@contextmanager
def fresh_gradients(chunks: Sequence[Any], add: bool) -> Iterator[None]:
    """Clear the gradients for a schedule, which ends by summing whole buffers over ranks; `add` earlier ones then."""
    buffers = [buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
    earlier = [buffer.grad_data.clone() for buffer in buffers if add]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    yield
    for buffer, sums in zip(buffers, earlier, strict=add):
        buffer.grad_data.add_(sums)
