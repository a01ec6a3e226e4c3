"""AdamW with decay on matrices alone, and gradient clipping over local shards."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from engines.config import EngineConfig


def build_optimizer(module: nn.Module, config: EngineConfig) -> torch.optim.AdamW:
    """Two parameter groups: matrices decay, vectors (norms, biases, decay rates) do not. One fused kernel call a
    step."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim >= 2]
    vectors = [p for p in trained if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError("no parameter of the model is trainable: build the engine with trainable=False instead")
    return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps, fused=True)


def clip_gradients(module: nn.Module, limit: float | None, group: dist.ProcessGroup | None = None) -> float:
    """The global gradient norm before clipping; gradients are scaled down to `limit` where it is above.

    Every parameter is sharded over all ranks along dimension 0 (FSDP2), so the squares of the shards add up to the
    whole. A norm that is not finite leaves the gradients alone: the caller drops the step.
    """
    shards = [_local(p.grad) for p in module.parameters() if p.grad is not None]
    shards = [shard for shard in shards if shard.numel()]
    squares = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    if shards:
        norms = torch.stack([norm.double() for norm in torch._foreach_norm(shards, dtype=torch.float32)])
        squares = norms.square().sum()
    if dist.get_world_size(group) > 1:
        squares = squares.to(torch.float32) if squares.device.type == "npu" else squares
        dist.all_reduce(squares, group=group)
    norm = float(squares.sqrt())
    if limit is not None and norm > limit and norm < float("inf"):
        torch._foreach_mul_(shards, limit / norm)
    return norm


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
