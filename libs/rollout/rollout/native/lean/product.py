"""Matrix products on a CPU, by the fastest way for each number of tokens.

Torch gives float32 products to MKL. oneDNN, which torch has beside it, computes those of many tokens at twice the rate
where MKL does not know the processor (an AMD EPYC with AVX-512: 240 against 105 GFLOP/s), and costs 8 microseconds more
a call; a matrix that it packed once is not brought into its layout at every call. One token's product waits for the
matrix to be read: by MKL at 21 to 29 GB/s there; as a weighted sum of rows, which is what `embedding_bag` makes, at 33
to 41, and shared among threads. On another (Zen 4) the sum of rows of 512 numbers reads at 20 to 25 GB/s, of 1,000 or
more at 12 to 14, MKL at 8 to 27: so long rows are cut into blocks of columns. Where vectors have 256 bits (an AMD EPYC
with AVX2, 17 GB/s of memory), MKL reads a matrix at 16 to 20 GB/s that has its longer side in one piece, against 9 to
12 by the sum. On Intel's processors MKL reads every matrix fastest, an input's row in one piece (a Xeon with AVX-512:
at 12 to 16 GB/s, by the sum at 9 to 12), and multiplies as fast as oneDNN for 10 to 20 microseconds less a call, but
for matrices that no cache holds.
"""

import functools
import math
from dataclasses import dataclass
from pathlib import Path

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
LEAST_PACKED = 3 << 16
"""Elements of a matrix from which that is so. With a smaller one oneDNN does it from `WORTHWHILE` on where vectors have
512 bits; else MKL is as fast, and adds within the product."""
LEAST_PACKED_INTEL = 1 << 19
"""The same where MKL knows the processor: oneDNN reads large matrices faster there, of two tokens or more."""
AVX512 = torch.backends.cpu.get_cpu_capability() == "AVX512"
"""Whether vectors have 512 bits: then a sum of rows is the fastest product of one token by any large matrix."""
CPU = Path("/proc/cpuinfo")
INTEL = CPU.exists() and b"GenuineIntel" in CPU.open("rb").read(4096)
"""Whether MKL knows the processor: then it multiplies whatever caches hold."""
WIDEST = 512
"""Most numbers of a row that is summed: a sum of longer ones reads the matrix at half the rate."""
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
        and not INTEL
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

    `columns` [H, N]; where `sums`, one token's product is a sum of rows, and long rows are in blocks [B, H, W], whose
    last may end in zeros; oneDNN multiplies `packed_from` tokens or more.
    """

    columns: Tensor
    outputs: int
    sums: bool
    packed_from: float

    @classmethod
    def of(cls, weight: Tensor) -> "Matrix":
        """Copy a weight [N, H]."""
        size, outputs = weight.numel(), weight.shape[0]
        if weight.dtype != torch.float32 or weight.device.type != "cpu" or onednn_pack is None or not size:
            return cls(weight.t().contiguous(), outputs, False, math.inf)
        large = size >= (LEAST_PACKED_INTEL if INTEL else LEAST_PACKED)
        least = WORTHWHILE_PACKED if large else WORTHWHILE if AVX512 and not INTEL else math.inf
        packed_from = max(2, least / size)
        narrow = not (AVX512 or INTEL) and outputs < weight.shape[1]
        if narrow and size >= LEAST_PACKED:
            return cls(weight.clone().t(), outputs, False, packed_from)
        sums = size >= READ_ONCE and (AVX512 or narrow) and not INTEL
        columns = _blocks(weight) if sums and outputs > WIDEST else weight.t().contiguous()
        return cls(columns, outputs, sums, packed_from)

    @functools.cached_property
    def packed(self) -> Tensor:
        """The matrix in oneDNN's layout; made at the first product of several tokens."""
        made: Tensor = onednn_pack(self._joined(self.columns).t().contiguous(), PACKED_FOR)
        return made

    def __call__(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        """Multiply x [T, H] by the matrix, plus shift [N] or [T, N]: [T, N]."""
        rows, columns = x.shape[0], self.columns
        if rows == 1 and self.sums:
            read = _read_once(x, columns)
            read = read if read.shape[1] == self.outputs else read[:, : self.outputs]
            return read if shift is None else read.add_(shift)
        if rows >= self.packed_from:
            done: Tensor = onednn_linear(x, self.packed, None, "none", [], "")
            return done if shift is None else done.add_(shift)
        if columns.dim() == 3:
            few = self._joined(x @ columns)
            return few if shift is None else few.add_(shift)
        return x @ columns if shift is None else torch.addmm(shift, x, columns)

    def _joined(self, blocks: Tensor) -> Tensor:
        """Return [T, N] of blocks [B, T, W], or what was joined already."""
        return blocks if blocks.dim() == 2 else blocks.transpose(0, 1).flatten(1)[:, : self.outputs]


def _blocks(weight: Tensor) -> Tensor:
    """Return the transpose of a weight [N, H] in blocks of equally many columns [B, H, W], the last filled up."""
    outputs, inputs = weight.shape
    count = -(-outputs // WIDEST)
    width = -(-outputs // (16 * count)) * 16
    blocks = weight.new_zeros(count, inputs, width)
    for block, part in zip(blocks, weight.t().split(width, 1), strict=True):
        block[:, : part.shape[1]] = part
    return blocks


def _read_once(x: Tensor, columns: Tensor) -> Tensor:
    """Return x [1, H] times columns [H, N] or [B, H, W] as sums of weighted rows: [1, N] or [1, B * W].

    Each thread makes a part of them.
    """
    inputs, width = columns.shape[-2:]
    count = 1 if columns.dim() == 2 else columns.shape[0]
    order, begins = _order(count, inputs, min(torch.get_num_threads(), inputs))
    x = x.view(-1)
    weights = x if count == 1 else torch.hstack([x] * count)
    table = columns if count == 1 else columns.view(-1, width)
    parts = torch.embedding_bag(table, order, begins, False, 0, False, weights)[0]
    if len(begins) > count:
        parts = parts.view(count, -1, width).sum(1)
    return parts if count == 1 else parts.view(1, -1)


@functools.lru_cache(maxsize=64)
def _order(blocks: int, rows: int, threads: int) -> tuple[Tensor, Tensor]:
    """Return all rows of all blocks in order, and where each part of them begins: of a block for each thread that lacks
    a whole one."""
    parts = -(-threads // blocks)
    begins = [block * rows + rows * part // parts for block in range(blocks) for part in range(parts)]
    return torch.arange(blocks * rows), torch.tensor(begins)
