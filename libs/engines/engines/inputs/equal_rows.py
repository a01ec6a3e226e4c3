"""Equal rows of a micro-batch enter the model once: groups of short answers are full of them.

A score follows from a row's tokens, positions and media alone. Of rows that agree in them, and in the tokens that are
scored, the first is computed, and its scores belong to all; the gradient of that one pass is then the sum of theirs.
What else rows have (advantages, the sampler's log-probs) may differ: it meets the scores behind the model. A picture
that several rows show enters the tower once, and its features stand in each of them.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from engines.execution.micro_batches import MicroBatch
from engines.families.registry import family_of
from engines.inputs.model_inputs import InputBuilder, ModelInputs, PackedInputs
from engines.media.media_batch import KINDS, TYPES, bytes_of
from seqpack.batches.packed import PackedBatch
from seqpack.planning.padding import packed_geometry

_READ = ("input_ids", "position_ids", TYPES)
_MEDIA = tuple(key for pair in KINDS.values() for key in pair)


def merges_rows(builder: InputBuilder, model: Any, device: torch.device) -> bool:
    """Return whether equal rows may enter a model once.

    Where they are told apart without waiting for a device, and no router counts what a row chooses.
    """
    plain = type(builder) is PackedInputs and not builder.replay
    return plain and device.type == "cpu" and not family_of(model.config).routed


def inputs_of_distinct_rows(micro_batch: MicroBatch, build: Callable[[MicroBatch], ModelInputs]) -> ModelInputs:
    """Build the inputs of a micro-batch's distinct rows, whose scores `InputBuilder.collect` gives to all rows."""
    packed = micro_batch.packed
    number, kept = _numbers(packed, micro_batch.wanted)
    if len(kept) == len(number):
        return _distinct_media(build(micro_batch))
    sizes = torch.tensor(packed.lengths)
    ends = sizes.cumsum(0)
    chosen = torch.tensor(kept)
    tokens = spans((ends - sizes)[chosen], sizes[chosen])
    few = _few(packed, kept, tokens)
    inputs = _distinct_media(build(replace(micro_batch, packed=few, wanted=micro_batch.wanted[tokens])))
    slots = micro_batch.wanted.nonzero().squeeze(1)
    places = torch.empty(few.num_tokens, dtype=torch.int64)
    places[inputs.slots] = torch.arange(len(inputs.slots))
    begins = few.cu_seqlens[:-1].to(torch.int64)[torch.tensor(number)]
    copies = places[spans(begins, sizes)[slots]]
    mtp = None if inputs.mtp is None else replace(inputs.mtp, slots=slots)  # it scores the same tokens
    return replace(inputs, slots=slots, tokens=packed.num_tokens, copies=copies, mtp=mtp)


def _numbers(packed: PackedBatch, wanted: Tensor) -> tuple[list[int], list[int]]:
    """Return the number of each row among the distinct ones, and the first row of each number."""
    if packed.num_tokens != sum(packed.lengths):  # padding belongs to no row
        return (rows := list(range(packed.num_sequences))), rows
    columns = [wanted, *(packed.values[key].reshape(-1, packed.num_tokens) for key in _READ if key in packed.values)]
    seen = torch.cat([column.view(-1, packed.num_tokens).to(torch.int64) for column in columns]).t().contiguous()
    known: dict[tuple[bytes, ...], int] = {}
    edges = packed.geometry.cu_seqlens
    number: list[int] = []
    kept: list[int] = []
    rows_of, media = seen.numpy(), _media(packed)
    for row, (begin, end) in enumerate(itertools.pairwise(edges)):
        key = (rows_of[begin:end].tobytes(), *(bytes_of(parts[row]) for parts in media.values()))
        number.append(known.setdefault(key, len(known)))
        if number[-1] == len(kept):
            kept.append(row)
    return number, kept


def _media(packed: PackedBatch) -> dict[str, tuple[Tensor, ...]]:
    """Return the media of each row by key: its patches, and their grids."""
    return {key: packed.values[key].split(packed.media_lengths[key]) for key in _MEDIA if key in packed.values}


def _distinct_media(inputs: ModelInputs) -> ModelInputs:
    return inputs if inputs.vision is None else replace(inputs, vision=inputs.vision.distinct())


def _few(packed: PackedBatch, rows: list[int], tokens: Tensor) -> PackedBatch:
    """Return some rows of a packed batch without padding, with what the model reads of them."""
    geometry = packed_geometry([packed.lengths[row] for row in rows])
    values = {key: packed.values[key][..., tokens] for key in _READ if key in packed.values}
    media = {key: [parts[row] for row in rows] for key, parts in _media(packed).items()}
    return replace(
        packed,
        values=values | {key: torch.cat(parts) for key, parts in media.items()},
        media_lengths={key: tuple(map(len, parts)) for key, parts in media.items()},
        cu_seqlens=torch.tensor(geometry.cu_seqlens, dtype=torch.int32),
        max_seqlen=geometry.max_seqlen,
        positions=packed.positions[tokens],
        lengths=geometry.lengths,
        indices=tuple(packed.indices[row] for row in rows),
        geometry=geometry,
        extras={},
    )


def spans(begins: Tensor, sizes: Tensor) -> Tensor:
    """Return the numbers begins[i] .. begins[i] + sizes[i] - 1 of each i, one after another."""
    shift = begins - sizes.cumsum(0) + sizes
    return torch.repeat_interleave(shift, sizes) + torch.arange(int(sizes.sum()))
