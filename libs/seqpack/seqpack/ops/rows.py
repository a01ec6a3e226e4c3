"""Functions of padded rows over packed sequences: for layers whose own code knows rows alone."""

from collections.abc import Callable

import torch
from torch import Tensor

from seqpack.ops.scatter_gather import lengths_of, positions_of, put_rows, take_rows
from seqpack.ops.varlen_attention import buckets


def by_rows(function: Callable[[Tensor], Tensor], x: Tensor, cu_seqlens: Tensor, backend: str = "auto") -> Tensor:
    """Apply a function of rows [n, L, D] -> [n, L, D'] to each packed sequence of x [T, D]; return [T, D'].

    The function has to treat rows apart and to be causal: sequences of similar length are padded with zeros at their
    ends. With backend "naive" it is called for one sequence at a time, as the reference.
    """
    lengths = lengths_of(cu_seqlens, x.shape[0])
    if not x.shape[0]:
        return function(x.new_zeros(1, 1, x.shape[1]))[0, :0]  # connected to the function's weights
    filled = [number for number, length in enumerate(lengths) if length]
    groups = [[number] for number in filled] if backend == "naive" else buckets(lengths)
    tokens = torch.arange(x.shape[0], device=x.device).split(lengths)
    places = [torch.cat([tokens[number] for number in group]) for group in groups]
    outputs = []
    for group, place in zip(groups, places, strict=True):
        sizes = torch.tensor([lengths[number] for number in group], device=x.device)
        rows, columns = positions_of(sizes)
        padded = put_rows(_pick(x, place), rows, columns, len(group), max(lengths[number] for number in group))
        outputs.append(take_rows(function(padded.squeeze(1)).unsqueeze(1), rows, columns))
    back = torch.empty(x.shape[0], dtype=torch.int64, device=x.device)
    back[torch.cat(places)] = torch.arange(x.shape[0], device=x.device)
    return _pick(torch.cat(outputs).squeeze(1), back).squeeze(1)


def _pick(x: Tensor, tokens: Tensor) -> Tensor:
    """Select distinct tokens of [T, D] as [t, 1, D] by `take_rows`, whose gradient is a copy."""
    return take_rows(x[None, None], torch.zeros_like(tokens), tokens)
