"""Prompts that several rows of a micro-batch begin with enter the model once: a group's answers share theirs.

Of a row the tokens before its first scored one are its prefix. Rows whose prefixes agree in tokens, positions and what
they see share one, behind which the rest of each stands (`seqpack.adapters.shared_prefixes`).
"""

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from engines.families.registry import family_of
from engines.inputs.equal_rows import spans
from engines.inputs.model_inputs import ModelInputs
from engines.media.vision_inputs import VisionInputs
from seqpack.adapters.context import LocalOps, PackedContext
from seqpack.adapters.rotary import by_length
from seqpack.adapters.shared_prefixes import SharedPrefixOps

_WORTH = 0.75
"""Largest share of tokens that is left at which copies for attention still pay."""


def shares_prefixes(model: Any) -> bool:
    """Return whether a model that merges rows mixes tokens by the context's operations alone, at any position."""
    family = family_of(model.config)
    return family.registered and not family.routed and not by_length(model)


def with_shared_prefixes(inputs: ModelInputs) -> ModelInputs:
    """Return packed inputs on the host with each shared prefix once; as they are where that saves little."""
    context = inputs.context
    if context is None or context.edges is None or inputs.mtp is not None or type(context.ops) is not LocalOps:
        return inputs
    edges = torch.tensor(context.edges)
    if edges[-1] != len(inputs.input_ids):  # padding belongs to no row
        return inputs
    begins, ends = edges[:-1], edges[1:]
    scored = torch.cat([inputs.rows + 1, edges[-1:]])
    sizes = scored[torch.searchsorted(scored, begins)].minimum(ends) - begins
    parents, firsts = _parents(inputs, begins.tolist(), sizes.tolist())
    kept = torch.cat([spans(begins[firsts], sizes[firsts]), spans(begins + sizes, ends - begins - sizes)])
    if len(kept) > _WORTH * len(inputs.input_ids):
        return inputs
    lengths = [*sizes[firsts].tolist(), *(ends - begins - sizes).tolist()]
    bounds = [0, *accumulate(lengths)]
    tokens = torch.empty_like(inputs.input_ids)
    tokens[kept] = torch.arange(len(kept))
    tokens[spans(begins, sizes)] = spans(torch.tensor(bounds)[parents], sizes)
    ops = SharedPrefixOps(context, tokens, kept, parents)
    shared = torch.tensor(bounds, dtype=torch.int32)
    rows = tokens[inputs.rows]
    return replace(
        inputs,
        input_ids=inputs.input_ids[kept],
        position_ids=inputs.position_ids[..., kept],
        rows=rows,
        read=rows.unique(),
        counted=inputs.counted[kept],
        context=PackedContext(shared, max(lengths), ops, edges=tuple(bounds)),
        vision=None if inputs.vision is None else _seen_once(inputs.vision, tokens, kept),
    )


def _parents(inputs: ModelInputs, begins: list[int], sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Return the number of each row's prefix among the distinct ones, and the first row of each number."""
    count = len(inputs.input_ids)
    features = torch.full((count,), -1)
    if inputs.vision is not None:
        features[inputs.vision.slots] = inputs.vision.features
    columns = [inputs.input_ids, *inputs.position_ids.reshape(-1, count), features]
    values = torch.stack(columns, dim=1).numpy()
    known: dict[bytes, int] = {}
    firsts: list[int] = []
    numbers: list[int] = []
    for row, (begin, size) in enumerate(zip(begins, sizes, strict=True)):
        numbers.append(known.setdefault(values[begin : begin + size].tobytes(), len(known)))
        if numbers[-1] == len(firsts):
            firsts.append(row)
    return torch.tensor(numbers), torch.tensor(firsts)


def _seen_once(vision: VisionInputs, tokens: Tensor, kept: Tensor) -> VisionInputs:
    """Return what the kept tokens see, at their new places."""
    own = torch.zeros(len(tokens), dtype=torch.bool).index_fill(0, kept, True)[vision.slots]
    return replace(vision, slots=tokens[vision.slots[own]], features=vision.features[own])
