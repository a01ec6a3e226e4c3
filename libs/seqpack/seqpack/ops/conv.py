"""Depthwise causal convolution over packed sequences, never over a boundary.

y[t] = act(bias + sum_j weight[:, K - 1 - j] * x[t - j]); before a sequence's first token x is zero, or the given state.
"""

from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import silu

from seqpack.ops.op_arguments import ConvCall
from seqpack.ops.probe import OpRequest, choose
from seqpack.ops.scatter_gather import lengths_of, positions_of, row_blocks

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
    run = choose(OpRequest.of("causal_conv1d", x, weight, bias, initial_state, cu_seqlens, **sizes), backend)
    result: Tensor = run(ConvCall(x, weight, bias, cu_seqlens, activation, initial_state))
    return result


def causal_conv1d_naive(call: ConvCall) -> Tensor:
    """Compute `causal_conv1d` one token at a time, as the reference."""
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
    """Compute `causal_conv1d` by K multiply-adds over the packed row; tokens across a boundary count as zero."""
    x, weight = call.x, call.weight
    compute = _compute_dtype(x, weight)
    lengths = torch.tensor(lengths_of(call.cu_seqlens, x.shape[0]), dtype=torch.int64, device=x.device)
    _, position = positions_of(lengths)
    w = weight.t().to(compute).contiguous()
    y: Tensor = _SlidingSum.apply(x.to(compute), w, position)
    if call.initial_state is not None and weight.shape[1] > 1:
        y = _add_states(y, w, lengths, call.initial_state.to(compute))
    if call.bias is not None:
        y = y + call.bias.to(compute)
    return (silu(y) if call.activation == "silu" else y).to(x.dtype)


def _add_states(y: Tensor, w: Tensor, lengths: Tensor, state: Tensor) -> Tensor:
    """Add the contribution of the state [n, D, K - 1] to the first K - 1 tokens of each sequence."""
    gap, starts = w.shape[0] - 1, lengths.cumsum(0) - lengths
    state = state.transpose(1, 2)
    for place in range(gap):
        seen = lengths > place
        y = y.index_add(0, starts[seen] + place, (state[seen, place:] * w[: gap - place]).sum(1))
    return y


def _compute_dtype(x: Tensor, weight: Tensor) -> torch.dtype:
    """Return the wider dtype of the two, and never less than float32."""
    return torch.promote_types(torch.promote_types(x.dtype, weight.dtype), torch.float32)


class _SlidingSum(torch.autograd.Function):
    """y[t] = sum_j w[K - 1 - j] * x[t - j] over j <= position[t], for x [T, D], w [K, D] and position i64[T].

    On a CPU a block of rows at a time: what is made on the way takes no fresh memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, position: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, position)
        y = torch.empty_like(x)
        for rows in row_blocks(x):
            torch.mul(x[rows], w[-1], out=y[rows])
            for j in range(1, w.shape[0]):
                here, past = _shifted(rows, j)
                _add_within(y[here], x[past], w[-1 - j], _first_rows(position[here], j))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = grads
        x, w, position = ctx.saved_tensors
        d_x, d_w = torch.empty_like(x), torch.zeros_like(w)
        for rows in row_blocks(x):
            torch.mul(grad[rows], w[-1], out=d_x[rows])
            d_w[-1] += (grad[rows] * x[rows]).sum(0)
            for j in range(1, w.shape[0]):
                here, past = _shifted(rows, j)  # past rows are in this block or the one before, which has begun
                first = _first_rows(position[here], j)
                _add_within(d_x[past], grad[here], w[-1 - j], first)
                d_w[-1 - j] += (grad[here] * x[past]).index_fill_(0, first, 0).sum(0)
        return d_x, d_w, None


def _first_rows(position: Tensor, count: int) -> Tensor:
    """Return the rows of the first `count` tokens of sequences, int64."""
    return (position < count).nonzero().squeeze(1)


def _add_within(y: Tensor, x: Tensor, w: Tensor, across: Tensor) -> None:
    """Add x * w to y, save the few rows `across` a boundary, which keep what they had."""
    kept = y.index_select(0, across)
    y.addcmul_(x, w).index_copy_(0, across, kept)


def _shifted(rows: slice, by: int) -> tuple[slice, slice]:
    """Return the slice of rows that have a row `by` places earlier, and the slice of those earlier rows."""
    start = min(max(rows.start, by), rows.stop)
    return slice(start, rows.stop), slice(start - by, rows.stop - by)


def causal_conv1d_state(x: Tensor, cu_seqlens: Tensor, kernel: int, initial_state: Tensor | None = None) -> Tensor:
    """Return the state for `causal_conv1d_step`: each sequence's last K - 1 inputs [n, D, K - 1], oldest first.

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
