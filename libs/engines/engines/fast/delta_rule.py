"""The gated delta rule as operations that a compiler treats as one node each: forward, and an explicit backward.

On a Hopper GPU they are FlashQLA's kernels; on a CPU plain torch (`seqpack.ops`), which is also the reference. Neither
normalises q and k, and neither has autograd inside.
"""

# ruff: noqa: ARG001 (a fake has the arguments of its operation)
from functools import partial
from typing import Any

import torch
from torch import Tensor

from engines.fast.autograd_reference import grad_of
from engines.fast.sequence_bounds import known, recall, remember
from seqpack.ops import gated_delta_rule as packed_rule

CHUNK = 64
"""Tokens in a chunk of FlashQLA's kernels on Hopper."""


def has_delta_nets(text: Any) -> bool:
    """Return whether a text model's configuration has gated delta nets."""
    return "linear_attention" in (getattr(text, "layer_types", None) or ())


@torch.library.custom_op("engines::delta_rule", mutates_args=())
def delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, boundaries: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the rule over each sequence: (o, cumulative decay, inverses); the backward pass needs the last two.

    q, k [T, Hk, D], v [T, Hv, D], g f32[T, Hv] (log decay), beta [T, Hv], boundaries i64[n + 1] -> o [T, Hv, D],
    f32[T, Hv] and [T, Hv, 64] (both empty on a CPU).
    """
    if not q.is_cuda:
        return _plain(boundaries, q, k, v, g, beta), g.new_empty(0), k.new_empty(0)
    from flash_qla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd

    cumulative, inverses, o, *_ = chunk_gated_delta_rule_fwd(
        *_rows(q, k, v, g, beta),
        scale=q.shape[-1] ** -0.5,
        cu_seqlens=known(boundaries),
        output_final_state=False,
        cp_context=_plan(boundaries, v.shape[1]),
        is_train=True,
    )
    return o.squeeze(0).to(v.dtype).contiguous(), cumulative.squeeze(0).contiguous(), inverses.squeeze(0).contiguous()


@delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, boundaries: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if v.device.type == "cpu":
        return v.new_empty(v.shape), g.new_empty(0), k.new_empty(0)
    return v.new_empty(v.shape), g.new_empty(g.shape), k.new_empty((*g.shape, CHUNK))


@torch.library.custom_op("engines::delta_rule_grad", mutates_args=())
def delta_rule_grad(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cumulative: Tensor,
    beta: Tensor,
    inverses: Tensor,
    boundaries: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (d q, d k, d v, d g, d beta) of `delta_rule`; the plain form takes g, the kernels the cumulative decay."""
    if not q.is_cuda:
        d_q, d_k, d_v, d_g, d_beta = grad_of(partial(_plain, boundaries), (q, k, v, g, beta), grad)
        return d_q, d_k, d_v, d_g, d_beta
    from flash_qla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd

    d_q, d_k, d_v, d_beta, d_g, _ = chunk_gated_delta_rule_bwd(
        *_rows(q, k, v, cumulative, beta),
        A=inverses.contiguous()[None],
        do=grad.contiguous()[None],
        scale=q.shape[-1] ** -0.5,
        cu_seqlens=known(boundaries),
        cp_context=_plan(boundaries, v.shape[1]),
    )
    return _like(d_q, q), _like(d_k, k), _like(d_v, v), _like(d_g, g), _like(d_beta, beta)


@delta_rule_grad.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    cumulative: Tensor,
    beta: Tensor,
    inverses: Tensor,
    boundaries: Tensor,
    grad: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _new(q), _new(k), _new(v), _new(g), _new(beta)


def prepare_delta_rule(boundaries: Tensor, edges: tuple[int, ...], heads: int) -> None:
    """Compute what FlashQLA would read from the device in each call: chunk numbers, and how it splits sequences.

    `heads`: value heads of the layers to come. Does nothing on a CPU.
    """
    if not boundaries.is_cuda:
        return
    from flash_qla.utils.index import prepare_varlen_metadata

    prepare_varlen_metadata(boundaries, torch.tensor(edges, dtype=torch.int64))
    _make_plan(boundaries, heads)


def _plan(boundaries: Tensor, heads: int) -> Any:
    plan = recall(boundaries, f"plan_{heads}")
    return _make_plan(boundaries, heads) if plan is None else plan


def _make_plan(boundaries: Tensor, heads: int) -> Any:
    from flash_qla.ops.gated_delta_rule.chunk.cp import build_cp_context
    from flash_qla.utils.index import prepare_varlen_metadata

    plan = build_cp_context(
        known(boundaries), enable_intra=True, num_v_heads=heads, chunk_size=CHUNK, is_train=True, force_intra_cp=False
    )
    if plan.is_intra:  # sequences are cut into parts, whose boundaries are looked at as well
        prepare_varlen_metadata(plan.intra_cp_cu_seqlens, plan.intra_cp_cu_seqlens.cpu())
    return remember(boundaries, f"plan_{heads}", plan)


def _new(like: Tensor) -> Tensor:
    return like.new_empty(like.shape)


def _like(grad: Tensor, operand: Tensor) -> Tensor:
    return grad.squeeze(0).to(operand.dtype).contiguous()


def _rows(*operands: Tensor) -> list[Tensor]:
    return [x.contiguous()[None] for x in operands]


def _plain(boundaries: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return packed_rule(q, k, v, g, beta, boundaries, l2norm_qk=False, backend="torch")[0].contiguous()
