"""Fused kernels of other packages behind the calls of this one; imported only after `probe` has said that they can run.

Boundaries are looked at once for all the layers that share a tensor of them: every look waits for the device.
"""

import inspect
import weakref
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from seqpack.ops.op_arguments import AttentionCall, ConvCall, DeltaCall, DeltaStep
from seqpack.private_api import writes


def causal_conv1d_package(call: ConvCall) -> Tensor:
    """Run the kernel of causal-conv1d, which keeps sequences apart by a sequence number per token."""
    from causal_conv1d import causal_conv1d_fn

    x, cu_seqlens = call.x, call.cu_seqlens
    tokens = x.shape[0]
    number = torch.arange(cu_seqlens.numel() - 1, device=x.device, dtype=torch.int32)
    seq_idx = torch.repeat_interleave(number, cu_seqlens.diff().long(), output_size=tokens)
    if tokens == 1:  # a single row has no stride between rows, and the backward pass insists on one: run two
        x, seq_idx = pad(x, (0, 0, 0, 1)), pad(seq_idx, (0, 1), value=cu_seqlens.numel())
    rows = x.contiguous()[None].transpose(1, 2)  # channels last, as its packed kernel wants it
    y = causal_conv1d_fn(rows, call.weight, call.bias, seq_idx=seq_idx[None], activation=call.activation)
    y = y.transpose(1, 2).squeeze(0)  # not [0]: its gradient would be written into zeros first
    result: Tensor = y[:1] if tokens == 1 else y
    return result


def causal_conv1d_fla(call: ConvCall) -> Tensor:
    """Run the Triton kernel of flash-linear-attention; its state has K columns, the first of which is not read."""
    from fla.modules.causal_conv1d import causal_conv1d

    y, _ = causal_conv1d(
        call.x.contiguous()[None],
        call.weight,
        call.bias,
        initial_state=None if call.initial_state is None else pad(call.initial_state.to(call.x.dtype), (1, 0)),
        activation=call.activation,
        cu_seqlens=call.cu_seqlens.long(),
    )
    result: Tensor = y.squeeze(0)
    return result


def gated_delta_rule_fla(call: DeltaCall) -> tuple[Tensor, Tensor | None]:
    """Run flash-linear-attention, chunked; where FlashQLA is installed, it uses its kernels (see below)."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return _batch_of_one(chunk_gated_delta_rule, call)


def gated_delta_rule_flash_qla(call: DeltaCall) -> tuple[Tensor, Tensor | None]:
    """Run FlashQLA itself, without flash-linear-attention.

    Where it cuts sequences, it would keep the states at the cuts for its backward pass, beside the tensors that
    autograd saves: a layer under `torch.utils.checkpoint` would hold them too (10 MiB each, in a model with 4 heads).
    """
    from flash_qla import chunk_gated_delta_rule

    return _batch_of_one(partial(chunk_gated_delta_rule, enable_fwd_cp_cache=False), call)


def _batch_of_one(kernel: Callable[..., Any], call: DeltaCall) -> tuple[Tensor, Tensor | None]:
    """Call a kernel that takes a batch dimension of one, a float32 decay, int64 boundaries and no empty sequence."""
    state = call.initial_state
    boundaries, filled = _BOUNDARIES.of(call.cu_seqlens)
    if filled is not None and state is not None:
        state = state[filled]
    o, final = kernel(
        *(x.contiguous()[None] for x in (call.q, call.k, call.v)),
        g=call.g.float().contiguous()[None],
        beta=call.beta.to(call.v.dtype).contiguous()[None],
        scale=call.scale,
        initial_state=None if state is None else state.float().contiguous(),
        output_final_state=call.output_final_state,
        use_qk_l2norm_in_kernel=call.l2norm_qk,
        cu_seqlens=boundaries,
    )
    if not call.output_final_state:
        return o.squeeze(0), None
    return o.squeeze(0), final if filled is None else _with_empty(final, filled, call)


def _with_empty(final: Tensor, filled: Tensor, call: DeltaCall) -> Tensor:
    """Return the final states of all sequences; those without tokens keep their initial state."""
    n = call.cu_seqlens.numel() - 1
    states = final.new_zeros(n, *final.shape[1:]) if call.initial_state is None else call.initial_state.to(final.dtype)
    return states.index_copy(0, filled, final)


class _Boundaries:
    """Boundaries as int64 without empty sequences (FlashQLA refuses those), and which sequences are left; None for all.

    The last tensor's answer is kept: the layers of a model ask for the same one in turn, and kernels that cache by
    identity then find theirs too.
    """

    def __init__(self) -> None:
        self._asked: weakref.ref[Tensor] | None = None
        self._version = -1
        self._answer: tuple[Tensor, Tensor | None] | None = None

    def of(self, cu_seqlens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (boundaries int64 [m + 1], indices int64 [m] of the m sequences with tokens or None)."""
        version = -1 if cu_seqlens.is_inference() else writes(cu_seqlens)  # inference tensors count no writes
        same = version >= 0 and version == self._version and self._asked is not None and self._asked() is cu_seqlens
        if not same or self._answer is None:
            boundaries = cu_seqlens.long()
            has_tokens = boundaries.diff() > 0
            if bool(has_tokens.all()):
                self._answer = boundaries, None
            else:
                mask = torch.cat([has_tokens.new_ones(1), has_tokens])
                self._answer = boundaries[mask], has_tokens.nonzero()[:, 0]
            self._asked, self._version = weakref.ref(cu_seqlens), version
        return self._answer


_BOUNDARIES = _Boundaries()


def gated_delta_rule_step_fla(step: DeltaStep) -> tuple[Tensor, Tensor]:
    """Advance by one token with the recurrent kernel of flash-linear-attention, which has no backward."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    o, after = fused_recurrent_gated_delta_rule(
        *(x.contiguous()[:, None] for x in (step.q, step.k, step.v)),
        g=step.g.float().contiguous()[:, None],
        beta=step.beta.to(step.v.dtype).contiguous()[:, None],
        scale=step.scale,
        initial_state=step.state.float().contiguous(),
        output_final_state=True,
        use_qk_l2norm_in_kernel=step.l2norm_qk,
    )
    return o[:, 0], step.state.copy_(after) if step.inplace else after.to(step.state.dtype)


def attention_varlen(call: AttentionCall) -> Tensor:
    """Run torch's variable-length flash attention; its keywords differ between torch releases."""
    from torch.nn.attention.varlen import varlen_attn  # one backend of several: loaded where it is chosen

    longest = call.max_seqlen
    if longest is None:
        longest = int(call.cu_seqlens.diff().max())
    names = _parameters(varlen_attn)
    options: dict[str, Any] = {"scale": call.scale} if "scale" in names else {}
    if "window_size" in names:
        options["window_size"] = (-1 if call.window is None else call.window - 1, 0 if call.causal else -1)
    elif call.window is not None:
        raise ValueError(f"varlen_attn of torch {torch.__version__} has no sliding window; use backend='torch'")
    else:
        options["is_causal"] = call.causal
    if "enable_gqa" in names:
        options["enable_gqa"] = call.q.shape[1] != call.k.shape[1]
    q = call.q if "scale" in names else call.q * (call.scale * call.q.shape[2] ** 0.5)
    cu = call.cu_seqlens.int()
    out = varlen_attn(q.contiguous(), call.k.contiguous(), call.v.contiguous(), cu, cu, longest, longest, **options)
    return out if isinstance(out, Tensor) else out[0]


@cache
def _parameters(function: Callable[..., Any]) -> frozenset[str]:
    """Return the parameter names of a function."""
    return frozenset(inspect.signature(function).parameters)
