"""Matrix products on a CPU, by the fastest way for each number of tokens.

Torch gives float32 products to MKL. oneDNN, which torch has beside it, computes those of many tokens at twice the rate
where MKL does not know the processor (an AMD EPYC with AVX-512: 240 against 105 GFLOP/s), and costs 8 microseconds more
a call; a matrix that it packed once is not brought into its layout at every call. One token's product waits for the
matrix to be read: by MKL at 21 to 29 GB/s there; as a weighted sum of rows, which is what `embedding_bag` makes, at 33
to 41, and shared among threads.
"""

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from rollout.private_api import onednn_linear, onednn_pack

WORTHWHILE = 1 << 21
"""Multiplications of a product from which oneDNN computes it."""
MIN_ROWS = 8
"""Least number of rows: fewer wait for memory either way."""
WORTHWHILE_PACKED = 1 << 20
"""Multiplications from which oneDNN does it, of two rows or more, by a matrix that it has packed."""
READ_ONCE = 1 << 16
"""Elements of a matrix from which one token's product is a weighted sum of its rows."""
PACKED_FOR = 16
"""Rows that a matrix is packed for; others use the same layout, which is the best or nearly so for 2 to 512."""


def worthwhile(x: Tensor, outputs: int) -> bool:
    """Return whether oneDNN should multiply x [T, H] by the module's own matrix of so many outputs."""
    return (
        x.shape[0] >= MIN_ROWS
        and x.shape[0] * x.shape[1] * outputs >= WORTHWHILE
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and onednn_linear is not None
    )


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [T, H] times the transpose of weight [N, H], plus bias [N]: [T, N]. Without gradients."""
    if worthwhile(x, weight.shape[0]):
        done: Tensor = onednn_linear(x, weight, bias, "none", [], "")
        return done
    return linear(x, weight, bias)


@dataclass(frozen=True)
class Matrix:
    """A copy of a matrix of N outputs of H inputs, in the layouts that products read fastest. Without gradients.

    `columns` [H, N]; `special`: float32 on a CPU, where torch has oneDNN.
    """

    columns: Tensor
    special: bool

    @classmethod
    def of(cls, weight: Tensor) -> "Matrix":
        """Copy a weight [N, H]."""
        plain = weight.dtype == torch.float32 and weight.device.type == "cpu"
        return cls(weight.t().contiguous(), plain and onednn_pack is not None)

    @functools.cached_property
    def packed(self) -> Tensor:
        """The matrix in oneDNN's layout; made at the first product of several tokens."""
        made: Tensor = onednn_pack(self.columns.t().contiguous(), PACKED_FOR)
        return made

    def __call__(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Multiply x [T, H] by the matrix, plus shift [N] or [T, N]: [T, N]."""
        rows, columns = x.shape[0], self.columns
        if self.special:
            if rows == 1 and columns.numel() >= READ_ONCE:
                read = _read_once(x, columns)
                return read if shift is None else read.add_(shift)
            if rows > 1 and rows * columns.numel() >= WORTHWHILE_PACKED:
                done: Tensor = onednn_linear(x, self.packed, None, "none", [], "")
                return done if shift is None else done.add_(shift)
        return x @ columns if shift is None else torch.addmm(shift, x, columns)


def _read_once(x: Tensor, columns: Tensor) -> Tensor:
    """Return x [1, H] times columns [H, N] as a sum of weighted rows; each thread sums a part of them."""
    order, begins = _order(x.shape[1], min(torch.get_num_threads(), x.shape[1]))
    parts = torch.embedding_bag(columns, order, begins, False, 0, False, x.view(-1))[0]
    return parts if parts.shape[0] == 1 else parts.sum(0, keepdim=True)


@functools.lru_cache(maxsize=64)
def _order(rows: int, parts: int) -> tuple[Tensor, Tensor]:
    """Return all rows in order, and where each part of them begins."""
    return torch.arange(rows), torch.tensor([rows * part // parts for part in range(parts)])
