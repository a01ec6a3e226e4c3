"""Causal attention over packed sequences as operations of one node each: forward, and an explicit backward.

On a GPU they are torch's flash attention; on a CPU plain torch (`seqpack.ops`), which is also the reference. Compilers
take both as they are, and so does autograd.
"""

# ruff: noqa: ARG001 (a fake has the arguments of its operation)
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.fast.autograd_reference import grad_of
from engines.private_api import flash_attention_backward, flash_attention_forward
from seqpack.ops import attention as packed_attention


@torch.library.custom_op("engines::causal_attention", mutates_args=())
def causal_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend inside each sequence: q [T, Hq, D], k and v [T, Hkv, D] -> (o [T, Hq, D], normalisers f32[T, Hq]).

    `cu_seqlens` i32[n + 1] on the device, `longest` i64[] on the CPU; `scale` of the scores, D ** -0.5 where None; a
    token sees the last `window` tokens. The normalisers are empty on a CPU.
    """
    if not q.is_cuda:
        return _plain(cu_seqlens, scale, window, q, k, v), q.new_empty(0, dtype=torch.float32)
    most = int(longest)
    o, normalizers, *_ = flash_attention_forward(
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        cu_seqlens,
        cu_seqlens,
        most,
        most,
        0.0,
        True,
        False,
        **_masks(q, scale, window),
    )
    return o.contiguous(), normalizers.t().contiguous()


@causal_attention.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    longest: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:
    shape = (0,) if q.device.type == "cpu" else (q.shape[0], q.shape[1])
    return q.new_empty(q.shape), q.new_empty(shape, dtype=torch.float32)


@torch.library.custom_op("engines::causal_attention_grad", mutates_args=())
def causal_attention_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    normalizers: Tensor,
    cu_seqlens: Tensor,
    longest: Tensor,
    grad: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (d q, d k, d v) of `causal_attention`."""
    if not q.is_cuda:
        d_q, d_k, d_v = grad_of(partial(_plain, cu_seqlens, scale, window), (q, k, v), grad)
        return d_q, d_k, d_v
    most = int(longest)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)
    d_q, d_k, d_v = flash_attention_backward(
        grad.contiguous(),
        q.contiguous(),
        k.contiguous(),
        v.contiguous(),
        o,
        normalizers.t().contiguous(),
        cu_seqlens,
        cu_seqlens,
        most,
        most,
        0.0,
        True,
        *no_dropout,
        **_masks(q, scale, window),
    )
    return d_q.contiguous(), d_k.contiguous(), d_v.contiguous()


@causal_attention_grad.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    normalizers: Tensor,
    cu_seqlens: Tensor,
    longest: Tensor,
    grad: Tensor,
    scale: float | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, longest, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens, longest)


def _backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    gradients = causal_attention_grad(*ctx.saved_tensors, grad, ctx.scale, ctx.window)
    return *gradients, None, None, None, None


causal_attention.register_autograd(_backward, setup_context=_keep)


def _masks(q: Tensor, scale: float | None, window: int | None) -> dict[str, Any]:
    """Return the options of torch's kernels: a window counts tokens before the own one."""
    sides = {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}
    return {"scale": q.shape[-1] ** -0.5 if scale is None else scale, **sides}


def _plain(cu_seqlens: Tensor, scale: float | None, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    options: dict[str, Any] = {"scale": scale, "window": window, "backend": "torch"}
    return packed_attention(q, k, v, cu_seqlens, **options).contiguous()
