"""Convolution and gated delta net of each row's newest token, which advance the row's states in place.

Both are `seqpack.ops` in as few operations as possible: with few rows a step's time is their number.
"""

import functools

import torch
from torch import Tensor
from torch.linalg import vector_norm
from torch.nn.functional import silu

from rollout.native.lean.model_weights import wide
from seqpack.ops import gated_delta_rule_step
from seqpack.ops.delta_rule import L2_EPS


def convolve_newest(x: Tensor, past: Tensor, weight: Tensor) -> Tensor:
    """Return the causal convolution and silu of x [n, D] after `past` [n, K - 1, D]; weight [D, K]."""
    window = torch.cat([past, x.unsqueeze(1)], dim=1)
    past.copy_(window.narrow(1, 1, past.shape[1]))
    return silu(wide(window).mul_(wide(weight).t()).sum(1)).to(x.dtype)


def recur_newest(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """Return the gated delta rule of q, k [n, Hk, Dk], v [n, Hv, Dv], g, beta [n, Hv] after `state` [n, Hv, Dk, Dv]."""
    if state.device.type != "cpu" or v.dtype != state.dtype:
        return gated_delta_rule_step(q, k, v, g, beta, state, inplace=True)[0]
    eps, scale = _constants(k.shape[2], v.dtype)
    qk = torch.stack([q, k], dim=2)  # [n, Hk, 2, Dk]
    length = vector_norm(qk, dim=-1, keepdim=True)
    qk *= torch.addcmul(eps, length, length).rsqrt_()
    if v.shape[1] != k.shape[1]:
        qk = qk.repeat_interleave(v.shape[1] // k.shape[1], dim=1)
    q, k = qk.unbind(2)
    state.mul_(g.exp().unsqueeze(-1).unsqueeze(-1))
    read_q, read_k = torch.bmm(qk.flatten(0, 1), state.flatten(0, 1)).view(*v.shape[:2], 2, -1).unbind(2)
    write = (v - read_k).mul_(beta.unsqueeze(-1))
    state.addcmul_(k.unsqueeze(-1), write.unsqueeze(2))
    return torch.addcmul(read_q, (q * k).sum(-1, keepdim=True), write).mul_(scale)


@functools.lru_cache(maxsize=8)
def _constants(key_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the eps of the norm of queries and keys [1], and the factor on the output []."""
    return torch.full((1,), L2_EPS, dtype=dtype), torch.tensor(key_dim**-0.5, dtype=dtype)
