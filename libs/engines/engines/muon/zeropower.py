"""The nearest orthogonal matrix, about: a few Newton-Schulz iterations in bfloat16 (Jordan et al. 2024).

The singular values of the result are between 0.7 and 1.2, which trains as well as 1 does. Arithmetic and constants are
those of `torch.optim.Muon`, here for a stack of matrices at once.
"""

import math

import torch
from torch import Tensor

STEPS = 5
COEFFICIENTS = 3.4445, -4.7750, 2.0315
EPS = 1e-7
DTYPE = torch.bfloat16
"""What the iterations compute in, and what matrices travel as."""


def zeropower_via_newtonschulz(matrices: Tensor) -> Tensor:
    """Return [N, rows, columns] in `DTYPE`, of matrices in that shape and any dtype."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(DTYPE)
    x = x.mT if tall else x
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=EPS)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def rate_ratio(rows: int, columns: int) -> float:
    """Return the factor of the learning rate that gives an update the root mean square of AdamW's, 0.2.

    Learning rate and decay are then those of AdamW (Liu et al. 2025, arXiv 2502.16982, section 2.2).
    """
    return 0.2 * math.sqrt(max(rows, columns))
