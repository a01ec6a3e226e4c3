"""Gated delta rule over packed sequences (Gated Delta Networks, arXiv 2412.06464, eq. 10).

For every head a state S [Dk, Dv] reads and writes one token at a time:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T
    o_t = scale * S_t^T q_t

`gated_delta_rule_naive` is these two lines; `gated_delta_rule_torch` is the chunkwise form (see `delta_rule_chunks`).
"""

import torch
from torch import Tensor

from seqpack.ops.delta_rule_chunks import chunked
from seqpack.ops.probe import Request, choose
from seqpack.ops.rows import lengths_of

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
        chunk_size: tokens per chunk of the chunked forms; chosen from the lengths where None.
        backend: "auto", "naive", "torch", "fla" or "flash_qla" (see `seqpack.ops.backends`).

    Returns:
        (o [T, Hv, Dv] in the dtype of v, final states [n, Hv, Dk, Dv] or None). States are float32, or float64 for float64 inputs.

    Raises:
        ValueError: shapes that disagree, or a backend that cannot run here, with the reason.
    """
    _check(q, k, v, g, beta)
    sizes = (cu_seqlens.numel() - 1, v.shape[1], k.shape[2], v.shape[2])
    if initial_state is not None and initial_state.shape != sizes:
        raise ValueError(f"initial_state must be [n, Hv, Dk, Dv] = {sizes}, got {tuple(initial_state.shape)}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be positive, got {chunk_size}")
    request = Request.of("gated_delta_rule", q, k, v, g, beta, initial_state, key_dim=k.shape[2], value_dim=v.shape[2])
    run = choose(request, backend)
    factor = k.shape[2] ** -0.5 if scale is None else scale
    return run(q, k, v, g, beta, cu_seqlens, factor, l2norm_qk, initial_state, output_final_state, chunk_size)


def gated_delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    scale: float | None = None,
    l2norm_qk: bool = True,
) -> tuple[Tensor, Tensor]:
    """Advance n sequences by one token.

    Args:
        q: [n, Hk, Dk].
        k: [n, Hk, Dk].
        v: [n, Hv, Dv].
        g: [n, Hv].
        beta: [n, Hv].
        state: [n, Hv, Dk, Dv]; not modified.
        scale: as in `gated_delta_rule`.
        l2norm_qk: as in `gated_delta_rule`.

    Returns:
        (o [n, Hv, Dv] in the dtype of v, the next state [n, Hv, Dk, Dv] in the dtype of the state).
    """
    _check(q, k, v, g, beta)
    sizes = (v.shape[0], v.shape[1], k.shape[2], v.shape[2])
    if state.shape != sizes:
        raise ValueError(f"state must be [n, Hv, Dk, Dv] = {sizes}, got {tuple(state.shape)}")
    factor = k.shape[2] ** -0.5 if scale is None else scale
    dtype = compute_dtype(v)
    q, k = (x.to(dtype).repeat_interleave(v.shape[1] // k.shape[1], dim=1) for x in (q, k))
    if l2norm_qk:
        q, k = l2norm(q), l2norm(k)
    o, after = _advance(state.to(dtype), q, k, v.to(dtype), g.to(dtype), beta.to(dtype))
    return (o * factor).to(v.dtype), after.to(state.dtype)


def _advance(state: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Apply the recurrence once: state [..., Dk, Dv], q and k [..., Dk], v [..., Dv], g and beta [...]."""
    decayed = state * g.exp()[..., None, None]
    error = v - torch.einsum("...kv,...k->...v", decayed, k)
    after = decayed + torch.einsum("...k,...v->...kv", k, error * beta[..., None])
    return torch.einsum("...kv,...k->...v", after, q), after


def gated_delta_rule_naive(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    l2norm_qk: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    chunk_size: int | None,  # noqa: ARG001  the recurrence has no chunks
) -> tuple[Tensor, Tensor | None]:
    """Compute it one token and one sequence at a time: the oracle."""
    dtype, groups = compute_dtype(v), v.shape[1] // k.shape[1]
    q, k, values, g, beta = (x.to(dtype) for x in (q, k, v, g, beta))
    outputs, finals, start = [], [], 0
    for index, length in enumerate(lengths_of(cu_seqlens, v.shape[0])):
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2], dtype=dtype)
        if initial_state is not None:
            state = initial_state[index].to(dtype)
        for t in range(start, start + length):
            q_t, k_t = q[t], k[t]
            if l2norm_qk:
                q_t = q_t / (q_t.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
                k_t = k_t / (k_t.square().sum(-1, keepdim=True) + L2_EPS).sqrt()
            q_t, k_t = q_t.repeat_interleave(groups, 0), k_t.repeat_interleave(groups, 0)
            o_t, state = _advance(state, q_t, k_t, values[t], g[t], beta[t])
            outputs.append(scale * o_t)
        finals.append(state)
        start += length
    o = torch.stack(outputs).to(v.dtype) if outputs else torch.zeros_like(v)
    if not output_final_state:
        return o, None
    return o, torch.stack(finals) if finals else v.new_zeros(0, v.shape[1], k.shape[2], v.shape[2], dtype=dtype)


def gated_delta_rule_torch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    l2norm_qk: bool,
    initial_state: Tensor | None,
    output_final_state: bool,
    chunk_size: int | None,
) -> tuple[Tensor, Tensor | None]:
    """Compute it chunkwise in plain torch, batched over all chunks of all sequences."""
    dtype, groups = compute_dtype(v), v.shape[1] // k.shape[1]
    lengths = lengths_of(cu_seqlens, v.shape[0])
    q, k = q.to(dtype), k.to(dtype)
    if l2norm_qk:
        q, k = l2norm(q), l2norm(k)
    q = q * scale
    if groups > 1:
        q, k = q.repeat_interleave(groups, dim=1), k.repeat_interleave(groups, dim=1)
    state = None if initial_state is None else initial_state.to(dtype)
    o, final = chunked(q, k, v.to(dtype), g.to(dtype), beta.to(dtype), lengths, state, output_final_state, chunk_size)
    return o.to(v.dtype), final


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def l2norm(x: Tensor) -> Tensor:
    """Divide by sqrt(sum of squares over the last dim + 1e-6)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> None:
    """Raise ValueError when the operands do not fit each other."""
    if q.dim() != 3 or q.shape != k.shape:
        raise ValueError(f"q and k must both be [T, Hk, Dk], got {tuple(q.shape)} and {tuple(k.shape)}")
    if v.dim() != 3 or v.shape[0] != q.shape[0]:
        raise ValueError(f"v must be [T, Hv, Dv] with T = {q.shape[0]}, got {tuple(v.shape)}")
    if v.shape[1] % k.shape[1]:
        raise ValueError(f"the {v.shape[1]} value heads are no multiple of the {k.shape[1]} key heads")
    if g.shape != v.shape[:2] or beta.shape != v.shape[:2]:
        raise ValueError(f"g and beta must be [T, Hv] = {tuple(v.shape[:2])}, got {tuple(g.shape)} and {tuple(beta.shape)}")
