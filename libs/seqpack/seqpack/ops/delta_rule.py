"""Gated delta rule over packed sequences (Gated Delta Networks, arXiv 2412.06464, eq. 10).

For every head a state S [Dk, Dv] is faded, corrected and read, one token at a time:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = scale * S_t^T q_t

`gated_delta_rule_naive` is these two lines; `gated_delta_rule_torch` is the chunkwise form (see `delta_rule_chunks`).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from seqpack.ops.delta_rule_chunks import chunked
from seqpack.ops.norms import unit_rows
from seqpack.ops.op_arguments import DeltaCall, DeltaStep
from seqpack.ops.probe import OpRequest, choose
from seqpack.ops.scatter_gather import lengths_of

L2_EPS = 1e-6


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    scale: float | None = None,
    l2norm_qk: bool = True,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    chunk_size: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Run the gated delta rule over each packed sequence, each with a state of its own.

    Args:
        q: queries [T, Hk, Dk].
        k: keys [T, Hk, Dk].
        v: values [T, Hv, Dv]; Hv is a multiple of Hk, and value head h reads key head h // (Hv // Hk).
        g: log decay [T, Hv], at most 0.
        beta: write strength [T, Hv].
        cu_seqlens: int32 [n + 1].
        scale: factor on the output; Dk ** -0.5 where None.
        l2norm_qk: divide q and k by sqrt(sum of squares + 1e-6) first.
        initial_state: [n, Hv, Dk, Dv]; zeros where None.
        output_final_state: also return the states after each sequence.
        chunk_size: tokens per chunk of the plain torch form; chosen from the lengths where None. Fused kernels have
            their own and are not taken when it is given.
        backend: "auto", "naive", "torch", "fla" or "flash_qla" (see `seqpack.ops.backends`).

    Returns:
        (o [T, Hv, Dv] in the dtype of v, final states [n, Hv, Dk, Dv] or None). States are float32, or float64 for
        float64 inputs.

    Raises:
        ValueError: shapes that disagree, or a backend that cannot run here, with the reason.
    """
    _check(q, k, v, g, beta)
    expected = (cu_seqlens.numel() - 1, v.shape[1], k.shape[2], v.shape[2])
    if initial_state is not None and initial_state.shape != expected:
        raise ValueError(f"initial_state must be [n, Hv, Dk, Dv] = {expected}, got {tuple(initial_state.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    sizes = _sizes(k, v, chunk_size)
    run = choose(OpRequest.of("gated_delta_rule", q, k, v, g, beta, initial_state, cu_seqlens, **sizes), backend)
    factor = k.shape[2] ** -0.5 if scale is None else scale
    result: tuple[Tensor, Tensor | None] = run(
        DeltaCall(q, k, v, g, beta, cu_seqlens, factor, l2norm_qk, initial_state, output_final_state, chunk_size)
    )
    return result


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None = None,
    l2norm_qk: bool = True,
    backend: str = "auto",
    inplace: bool = False,
) -> tuple[Tensor, Tensor]:
    """Advance n sequences by one token.

    Args:
        q: [n, Hk, Dk].
        k: [n, Hk, Dk].
        v: [n, Hv, Dv].
        g: [n, Hv].
        beta: [n, Hv].
        state: [n, Hv, Dk, Dv].
        scale: as in `gated_delta_rule`.
        l2norm_qk: as in `gated_delta_rule`.
        backend: "auto", "torch" or "fla".
        inplace: write the next state into `state` (decoding, without gradients) instead of returning another tensor.

    Returns:
        (o [n, Hv, Dv] in the dtype of v, the next state [n, Hv, Dk, Dv] in the dtype of the state).
    """
    _check(q, k, v, g, beta)
    expected = (v.shape[0], v.shape[1], k.shape[2], v.shape[2])
    if state.shape != expected:
        raise ValueError(f"state must be [n, Hv, Dk, Dv] = {expected}, got {tuple(state.shape)}")
    request = OpRequest.of("gated_delta_rule_step", q, k, v, g, beta, state, **_sizes(k, v, None))
    if inplace and request.grad:
        raise ValueError("inplace=True keeps no state for a backward pass; call it under torch.no_grad()")
    factor = k.shape[2] ** -0.5 if scale is None else scale
    result: tuple[Tensor, Tensor] = choose(request, backend)(
        DeltaStep(q, k, v, g, beta, state, factor, l2norm_qk, inplace)
    )
    return result


def gated_delta_rule_step_torch(step: DeltaStep) -> tuple[Tensor, Tensor]:
    """Advance n sequences by one token in plain torch: one product gives S^T q and S^T k of the faded state, then o =
    scale (S^T q + (q . k) u) with the write u. So the state is read once and written once."""
    v, dtype = step.v, _compute_dtype(step.v)
    qk = torch.stack([step.q, step.k], dim=2).to(dtype)  # [n, Hk, 2, Dk]
    if step.l2norm_qk:
        qk = _l2norm(qk)
    if v.shape[1] != qk.shape[1]:
        qk = qk.repeat_interleave(v.shape[1] // qk.shape[1], dim=1)
    q, k = qk.select(2, 0), qk.select(2, 1)  # cheaper than unbind, which counts where a step is a few small calls
    fade = step.g.to(dtype).exp().unsqueeze(-1).unsqueeze(-1)
    own = step.inplace and step.state.dtype == dtype
    with _without_autocast(v.device.type):
        faded = step.state.mul_(fade) if own else step.state.to(dtype) * fade
        reads = torch.matmul(qk, faded)
        write = (v.to(dtype) - reads.select(2, 1)) * step.beta.to(dtype).unsqueeze(-1)
        outer = (k.unsqueeze(-1), write.unsqueeze(2))
        after = faded.addcmul_(*outer) if own else torch.addcmul(faded, *outer)
        o = torch.addcmul(reads.select(2, 0), (q * k).sum(-1, keepdim=True), write) * step.scale
    if step.inplace:
        return o.to(v.dtype), after if own else step.state.copy_(after)
    return o.to(v.dtype), after.to(step.state.dtype)


def _without_autocast(kind: str) -> AbstractContextManager[Any]:
    """Return a context without autocast; a null context where it is off, as entering one takes time."""
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


def gated_delta_rule_naive(call: DeltaCall) -> tuple[Tensor, Tensor | None]:
    """Compute `gated_delta_rule` one token and one sequence at a time, as the reference."""
    dtype, groups = _compute_dtype(call.v), call.v.shape[1] // call.k.shape[1]
    q, k, v, g, beta = (x.to(dtype) for x in (call.q, call.k, call.v, call.g, call.beta))
    outputs, finals, start = [], [], 0
    for index, length in enumerate(lengths_of(call.cu_seqlens, v.shape[0])):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2])
        if call.initial_state is not None:
            state = call.initial_state[index].to(dtype)
        for t in range(start, start + length):
            q_t, k_t = q[t], k[t]
            if call.l2norm_qk:
                q_t = q_t / (q_t.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
                k_t = k_t / (k_t.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
            q_t, k_t = q_t.repeat_interleave(groups, 0), k_t.repeat_interleave(groups, 0)
            state = state * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("hkv,hk->hv", state, k_t)
            state = state + beta[t][:, None, None] * torch.einsum("hk,hv->hkv", k_t, error)
            outputs.append(call.scale * torch.einsum("hkv,hk->hv", state, q_t))
        finals.append(state)
        start += length
    o = (torch.stack(outputs) if outputs else v).to(call.v.dtype)
    if not call.output_final_state:
        return o, None
    return o, torch.stack(finals) if finals else v.new_zeros(0, v.shape[1], k.shape[2], v.shape[2])


def gated_delta_rule_torch(call: DeltaCall) -> tuple[Tensor, Tensor | None]:
    """Compute `gated_delta_rule` chunkwise in plain torch, batched over all chunks of all sequences."""
    dtype, groups = _compute_dtype(call.v), call.v.shape[1] // call.k.shape[1]
    lengths = lengths_of(call.cu_seqlens, call.v.shape[0])
    q, k, v, g, beta = (x.to(dtype) for x in (call.q, call.k, call.v, call.g, call.beta))
    if call.l2norm_qk:
        q, k = unit_rows(q, L2_EPS, call.scale), unit_rows(k, L2_EPS)
    else:
        q = q * call.scale
    if groups > 1:
        q, k = q.repeat_interleave(groups, dim=1), k.repeat_interleave(groups, dim=1)
    state = None if call.initial_state is None else call.initial_state.to(dtype)
    with _without_autocast(v.device.type):
        o, final = chunked(q, k, v, g, beta, lengths, state, call.output_final_state, call.chunk_size)
    return o.to(call.v.dtype), final


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _l2norm(x: Tensor) -> Tensor:
    """Divide by sqrt(sum of squares over the last dim + 1e-6)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _sizes(k: Tensor, v: Tensor, chunk_size: int | None) -> dict[str, int | bool]:
    """Return the sizes that kernels check, by name."""
    return {"key_dim": k.shape[2], "value_dim": v.shape[2], "chunk_size": chunk_size is not None}


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raise ValueError when the operands do not fit each other."""
    if q.dim() != 3 or q.shape != k.shape:
        raise ValueError(f"q and k must both be [T, Hk, Dk], got {tuple(q.shape)} and {tuple(k.shape)}")
    if v.dim() != 3 or v.shape[0] != q.shape[0]:
        raise ValueError(f"v must be [T, Hv, Dv] with T = {q.shape[0]}, got {tuple(v.shape)}")
    if v.shape[1] % k.shape[1]:
        raise ValueError(f"the {v.shape[1]} value heads are no multiple of the {k.shape[1]} key heads")
    for name, x in (("g", g), ("beta", beta)):
        if x.shape != v.shape[:2]:
            raise ValueError(f"{name} must be [T, Hv] = {tuple(v.shape[:2])}, got {tuple(x.shape)}")
