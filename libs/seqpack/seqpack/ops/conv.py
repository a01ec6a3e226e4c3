"""Depthwise causal convolution over packed sequences, never over a boundary.

y[t] = act(bias + sum_j weight[:, K - 1 - j] * x[t - j]); before a sequence's first token x is zero, or the given state.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from seqpack.ops.calls import ConvCall
from seqpack.ops.probe import Request, choose
from seqpack.ops.rows import lengths_of, positions_of, put_rows, take_rows

Activation = Literal["silu"] | None


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    cu_seqlens: Tensor,
    activation: Activation = None,
    initial_state: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Convolve each packed sequence with its own past.

    Args:
        x: packed tokens [T, D].
        weight: [D, K]; weight[:, K - 1] multiplies the token itself, as in a squeezed `nn.Conv1d` weight.
        bias: [D] or None.
        cu_seqlens: int32 [n + 1].
        activation: "silu" or None.
        initial_state: [n, D, K - 1], the K - 1 inputs before each sequence, oldest first; zeros where None.
        backend: "auto", "naive", "torch", "causal_conv1d" or "fla" (see `seqpack.ops.backends`).

    Returns:
        [T, D] in the dtype of x.

    Raises:
        ValueError: shapes that disagree, or a backend that cannot run here, with the reason.
    """
    _check(x, weight, bias, activation)
    n, kernel = cu_seqlens.numel() - 1, weight.shape[1]
    if initial_state is not None and initial_state.shape != (n, x.shape[1], kernel - 1):
        raise ValueError(f"initial_state must be {(n, x.shape[1], kernel - 1)}, got {tuple(initial_state.shape)}")
    sizes = {"kernel": kernel, "dim": x.shape[1], "state": initial_state is not None}
    run = choose(Request.of("causal_conv1d", x, weight, bias, initial_state, cu_seqlens, **sizes), backend)
    result: Tensor = run(ConvCall(x, weight, bias, cu_seqlens, activation, initial_state))
    return result


def causal_conv1d_naive(call: ConvCall) -> Tensor:
    """Compute it one token at a time: the oracle."""
    x, kernel, out, start = call.x, call.weight.shape[1], [], 0
    for index, length in enumerate(lengths_of(call.cu_seqlens, x.shape[0])):
        past = [x.new_zeros(x.shape[1])] * (kernel - 1)
        if call.initial_state is not None:
            past = list(call.initial_state[index].unbind(1))
        seen = [*past, *x[start : start + length].unbind(0)]
        for t in range(length):
            y = torch.zeros_like(x[0]) if call.bias is None else call.bias
            for j in range(kernel):
                y = y + call.weight[:, j] * seen[t + j]
            out.append(y * torch.sigmoid(y) if call.activation == "silu" else y)
        start += length
    return torch.stack(out) if out else torch.zeros_like(x)


def causal_conv1d_torch(call: ConvCall) -> Tensor:
    """Compute it with K multiply-adds over a buffer that has K - 1 rows of past in front of every sequence."""
    x, total, gap = call.x, call.x.shape[0], call.weight.shape[1] - 1
    compute = _compute_dtype(x, call.weight)
    lengths = torch.tensor(lengths_of(call.cu_seqlens, total), dtype=torch.int64, device=x.device)
    sequence, _ = positions_of(lengths)
    n = lengths.numel()
    slots = torch.arange(total, device=x.device) + (sequence + 1) * gap
    source, places = x.to(compute), slots
    if call.initial_state is not None and gap:
        front = lengths.cumsum(0) - lengths + torch.arange(n, device=x.device) * gap
        source = torch.cat([source, call.initial_state.transpose(1, 2).reshape(n * gap, -1).to(compute)])
        places = torch.cat([slots, (front[:, None] + torch.arange(gap, device=x.device)).flatten()])
    buffer = put_rows(source[:, None], torch.zeros_like(places), places, 1, total + n * gap)[0, 0]
    y = _SlidingSum.apply(buffer, call.weight.t().to(compute).contiguous())
    y = take_rows(y[None, None], torch.zeros_like(slots), slots - gap)[:, 0]
    if call.bias is not None:
        y = y + call.bias.to(compute)
    return (silu(y) if call.activation == "silu" else y).to(x.dtype)


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the wider dtype of the two, and never less than float32."""
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


class _SlidingSum(torch.autograd.Function):
    """y[t] = sum_j w[j] * buffer[t + j] for buffer [L, D] and w [K, D]; keeps one copy of the buffer instead of K."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(buffer, w)
        kernel, length = w.shape[0], max(0, buffer.shape[0] - w.shape[0] + 1)
        y = buffer[:length] * w[0]
        for j in range(1, kernel):
            y.addcmul_(buffer[j : j + length], w[j])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (grad,) = grads
        buffer, w = ctx.saved_tensors
        length = grad.shape[0]
        d_buffer, d_w = torch.zeros_like(buffer), torch.zeros_like(w)
        for j in range(w.shape[0]):
            d_buffer[j : j + length].addcmul_(grad, w[j])
            d_w[j] = (grad * buffer[j : j + length]).sum(0)
        return d_buffer, d_w


def causal_conv1d_state(x: Tensor, cu_seqlens: Tensor, kernel: int, initial_state: Tensor | None = None) -> Tensor:
    """Return what `causal_conv1d_step` goes on from: each sequence's last K - 1 inputs [n, D, K - 1], oldest first.

    Sequences shorter than K - 1 are filled up from `initial_state`, or with zeros.
    """
    gap, total = kernel - 1, x.shape[0]
    lengths = torch.tensor(lengths_of(cu_seqlens, total), dtype=torch.int64, device=x.device)[:, None]
    n = lengths.shape[0]
    column = torch.arange(gap, device=x.device)
    before = lengths.cumsum(0) - gap + column  # the token of each place, if its sequence is that long
    past = torch.arange(n, device=x.device)[:, None] * gap + lengths + column + total
    if initial_state is None:
        source = torch.cat([x, x.new_zeros(1, x.shape[1])])
        past = torch.full_like(before, total)
    else:
        source = torch.cat([x, initial_state.transpose(1, 2).reshape(n * gap, -1).to(x.dtype)])
    return source[torch.where(column >= gap - lengths, before, past)].transpose(1, 2)


def causal_conv1d_step(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: Activation = None
) -> tuple[Tensor, Tensor]:
    """Advance n sequences by one token.

    Args:
        x: the new inputs [n, D].
        conv_state: the K - 1 inputs before them [n, D, K - 1], oldest first; not modified.
        weight: [D, K].
        bias: [D] or None.
        activation: "silu" or None.

    Returns:
        (y [n, D], the next state [n, D, K - 1]).
    """
    _check(x, weight, bias, activation)
    if conv_state.shape != (*x.shape, weight.shape[1] - 1):
        raise ValueError(f"conv_state must be {(*x.shape, weight.shape[1] - 1)}, got {tuple(conv_state.shape)}")
    # Channels last inside, and in the memory of the state that is returned: the sum over K is then over whole rows.
    window = torch.cat([conv_state.transpose(1, 2).to(x.dtype), x.unsqueeze(1)], dim=1)
    compute = _compute_dtype(x, weight)
    y = (window.to(compute) * weight.t().to(compute)).sum(1)
    if bias is not None:
        y = y + bias.to(compute)
    return (silu(y) if activation == "silu" else y).to(x.dtype), window.narrow(1, 1, weight.shape[1] - 1).transpose(
        1, 2
    )


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
    """Raise ValueError when the operands do not fit each other."""
    if x.dim() != 2 or weight.dim() != 2 or weight.shape[0] != x.shape[1] or weight.shape[1] < 1:
        raise ValueError(f"x must be [T, D] and weight [D, K], got {tuple(x.shape)} and {tuple(weight.shape)}")
    if bias is not None and bias.shape != (x.shape[1],):
        raise ValueError(f"bias must be [{x.shape[1]}], got {tuple(bias.shape)}")
    if activation not in (None, "silu"):
        raise ValueError(f"activation must be 'silu' or None, got {activation!r}")
