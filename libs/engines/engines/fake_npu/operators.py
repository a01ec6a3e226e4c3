"""A few operators of torch_npu on the CPU, written from what its documentation says they compute."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Return (x * rstd * gamma in x's dtype, rstd f32[..., 1...]): the mean is over the dimensions of gamma."""
    over = tuple(range(-gamma.ndim, 0))
    wide = x.float()
    rstd = torch.rsqrt(wide.square().mean(over, keepdim=True) + epsilon)
    return (wide * rstd * gamma.float()).to(x.dtype), rstd


def npu_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Tensor | None = None
) -> Tensor:
    """Return x * r1 + turned(x) * r2: "half" turns the two halves of the last dimension, "interleave" neighbours."""
    if rotate is not None:
        raise NotImplementedError("npu_rotary_mul with `rotate` is not in the stand-in")
    if rotary_mode == "half":
        first, second = x.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
    elif rotary_mode == "interleave":
        turned = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        raise RuntimeError(f"The rotary_mode only supports half and interleave, got {rotary_mode}")
    return x * r1 + turned * r2


def npu_swiglu(x: Tensor, dim: int = -1) -> Tensor:
    """Return silu of the first half along `dim`, times the second."""
    gate, value = x.chunk(2, dim)
    return torch.nn.functional.silu(gate) * value


def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    **others: Any,
) -> list[Tensor]:
    """Return one matrix product a group, for one x and one weight (`split_item` 2 or 3: one result).

    `group_list` says where groups end (`group_list_type` 0) or how long they are (1). `group_type` 0 splits the rows:
    x [m, k], weight [groups, k, n], result [m, n]. 2 splits what is summed over: x [m, k], weight [k, n], result
    [groups, m, n].
    """
    if unsupported := sorted(name for name, value in others.items() if value is not None):
        raise NotImplementedError(f"npu_grouped_matmul with {', '.join(unsupported)} is not in the stand-in")
    if len(x) != 1 or len(weight) != 1 or split_item not in (2, 3) or group_list is None:
        raise NotImplementedError("the stand-in's npu_grouped_matmul has one x, one weight, split_item 2 or 3")
    ends = group_list if group_list_type == 0 else group_list.cumsum(0)
    edges = [0, *ends.tolist()]
    spans = list(pairwise(edges))
    (rows,), (matrices,) = x, weight
    if edges[-1] != rows.shape[0 if group_type == 0 else 1]:
        raise RuntimeError(f"group_list ends at {edges[-1]}, x is {tuple(rows.shape)}")
    if group_type == 0:
        return [torch.cat([rows[a:b] @ matrix for (a, b), matrix in zip(spans, matrices, strict=True)])]
    if group_type == 2:
        return [torch.stack([rows[:, a:b] @ matrices[a:b] for a, b in spans])]
    raise NotImplementedError(f"group_type {group_type} is not in the stand-in")


def histc(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:  # noqa: A002 (torch's names)
    """Compute torch's histogram, for integers too: the CPU has it for floats alone, and models use it on any device."""
    return torch.histc(x.cpu().double(), bins, float(min), float(max)).to(x.device, x.dtype)


CALLS: Counter[str] = Counter()
"""Number of calls of torch_npu's operators in this process."""
ATEN: dict[str, Callable[..., Any]] = {"histc": histc}
"""Operators of torch's own whose CPU kernel takes less than a device's."""
OPERATORS: dict[str, Callable[..., Any]] = {
    "npu_rms_norm": npu_rms_norm,
    "npu_rotary_mul": npu_rotary_mul,
    "npu_swiglu": npu_swiglu,
    "npu_grouped_matmul": npu_grouped_matmul,
}
