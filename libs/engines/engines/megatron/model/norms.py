"""RMSNorm as Qwen has it, for layers that hold a part of the tokens or of the heads."""

from typing import Any

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    """x / rms(x) * (weight + offset) over the last dimension, computed in float32 at least.

    Every tensor-parallel rank has the weight and sees a part: some tokens (sequence parallelism) or some heads. So its
    gradient must be added up over them, once, which Megatron does for parameters that are marked `sequence_parallel`.
    """

    offset = 0.0

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * (self.weight.to(wide.dtype) + self.offset)).to(x.dtype)


class CenteredNorm(Norm):
    """A norm whose weight is kept as its distance from one."""

    offset = 1.0
