"""Blocks against the definition: token i of a sequence sees tokens 0..i of the same sequence, wherever they lie."""

from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dyncp.planning.sizes import Layout
from dyncp.sharding.layout import Block, Selection, Sharding

CPU = torch.device("cpu")


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    size = draw(st.integers(1, 5))
    layout: Layout = draw(st.sampled_from(get_args(Layout)))
    align = 2 * size if layout == "zigzag" and size > 1 else 1
    lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=6))
    bounds = np.cumsum([0, *(-(-n // align) * align for n in lengths)]).tolist()
    if bounds[-1] % size:
        bounds.append(-(-bounds[-1] // size) * size)
    return Sharding(tuple(bounds), size, layout)


def indices(block: Block) -> tuple[list[int], list[int]]:
    def of(selection: Selection) -> list[int]:
        if selection.index is None:
            return list(range(selection.start, selection.start + selection.length))
        found: list[int] = selection.index.tolist()
        return found

    return of(block.q), of(block.k)


def pairs(block: Block) -> set[tuple[int, int]]:
    q_index, k_index = indices(block)
    found = set()
    spans = zip(block.cu_q[:-1].tolist(), block.q_lengths, block.cu_k[:-1].tolist(), block.k_lengths, strict=True)
    for q0, q_len, k0, k_len in spans:
        for i in range(q_len):
            seen = k_len - q_len + i + 1 if block.causal else k_len
            found |= {(q_index[q0 + i], k_index[k0 + j]) for j in range(seen)}
    return found


def truth(sharding: Sharding) -> set[tuple[int, int]]:
    return {
        (i, j)
        for a, b in zip(sharding.bounds, sharding.bounds[1:], strict=False)
        for i in range(a, b)
        for j in range(a, i + 1)
    }


@given(shardings())
def test_ranks_hold_every_token_once(sharding: Sharding) -> None:
    ends = np.concatenate([sharding.stream_index(rank) for rank in range(sharding.cp_size)])
    assert sorted(ends.tolist()) == list(range(sharding.total))
    assert {len(sharding.stream_index(r)) for r in range(sharding.cp_size)} == {sharding.local_tokens}
    order = sharding.gathered_order
    restored = ends if order is None else ends[order]
    assert restored.tolist() == list(range(sharding.total))


@given(shardings())
def test_ring_blocks_are_the_causal_mask(sharding: Sharding) -> None:
    found: list[tuple[int, int]] = []
    for rank in range(sharding.cp_size):
        for step in range(sharding.cp_size):
            other = (rank - step) % sharding.cp_size
            block = sharding.block(rank, other, CPU)
            if block is None:
                continue
            assert step < sharding.ring_steps
            q, k = sharding.stream_index(rank), sharding.stream_index(other)
            found += [(int(q[i]), int(k[j])) for i, j in pairs(block)]
    assert len(found) == len(set(found))
    assert set(found) == truth(sharding)


@given(shardings())
def test_stream_blocks_are_the_causal_mask(sharding: Sharding) -> None:
    found: list[tuple[int, int]] = []
    for rank in range(sharding.cp_size):
        q = sharding.stream_index(rank)
        for block in sharding.stream_blocks(rank, CPU):
            found += [(int(q[i]), j) for i, j in pairs(block)]
    assert len(found) == len(set(found))
    assert set(found) == truth(sharding)


def test_zigzag_gives_every_rank_the_same_work_and_contiguous_does_not() -> None:
    def work(layout: Layout) -> list[int]:
        sharding = Sharding((0, 48), 4, layout)
        return [sum(len(pairs(b)) for b in sharding.stream_blocks(rank, CPU)) for rank in range(4)]

    assert len(set(work("zigzag"))) == 1
    assert work("contiguous") == sorted(work("contiguous"))
    assert max(work("contiguous")) > 1.5 * np.mean(work("contiguous"))


def test_short_sequences_end_the_contiguous_ring_early() -> None:
    assert Sharding((0, 3, 8, 11, 16), 4).ring_steps == 2
    assert Sharding((0, 4, 8, 12, 16), 4).ring_steps == 1
    assert Sharding((0, 16), 4).ring_steps == 4


@pytest.mark.parametrize(
    ("bounds", "size", "layout", "message"),
    [
        ((0, 7), 2, "contiguous", "pad the stream's end to 8"),
        ((0, 6, 8), 2, "zigzag", "sequence 0 has 6 tokens: pack with align=4"),
        ((0, 4, 4), 2, "contiguous", "must start at 0 and increase"),
        ((1, 4), 1, "contiguous", "must start at 0 and increase"),
        ((0, 4), 2, "striped", "choose one of"),
    ],
)
def test_streams_that_do_not_shard_are_refused(
    bounds: tuple[int, ...], size: int, layout: Layout, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Sharding(bounds, size, layout)


def test_a_sharding_is_made_once() -> None:
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    sharding = Sharding.of(cu, 2, "contiguous")
    assert Sharding.of(sharding, 2, "contiguous") is sharding
    assert sharding.local_cu_seqlens(1, CPU, extra=1).tolist() == [0, 5]
    with pytest.raises(ValueError, match="the sharding is for 2 ranks in contiguous, the call for 4"):
        Sharding.of(sharding, 4, "contiguous")
