"""Packed and padded inputs by hand: which hidden state scores which token, and what a router counts."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.execution.micro_batches import MicroBatch, dummy_micro_batch
from engines.inputs.model_inputs import PackedInputs, PaddedInputs
from engines.tiny import tiny_batch
from seqpack import pack_sequences, view_batch
from seqpack.adapters.context import LocalOps
from seqpack.batches.batch import make_batch

IDS = [[10, 11, 12], [20, 21]]
MASKS = [[False, False, True], [False, True]]


def micro_batch(align: int = 1, **more: Any) -> MicroBatch:
    samples = [
        {"input_ids": ids, "loss_mask": mask, **{key: value[row] for key, value in more.items()}}
        for row, (ids, mask) in enumerate(zip(IDS, MASKS, strict=True))
    ]
    packed = pack_sequences(make_batch(samples), align=align)
    return MicroBatch(packed, (0, 1), packed.values["loss_mask"], (0,))


def lists(inputs: Any, names: tuple[str, ...]) -> list[Any]:
    return [getattr(inputs, name).tolist() for name in names]


NAMES = ("input_ids", "position_ids", "rows", "targets", "slots", "counted")


def test_packed() -> None:
    ops = LocalOps("torch")
    inputs = PackedInputs(ops).inputs(micro_batch())
    assert lists(inputs, NAMES) == [
        [10, 11, 12, 20, 21],
        [0, 1, 2, 0, 1],
        [1, 3],
        [12, 21],
        [2, 4],
        [True] * 5,
    ]
    assert (inputs.tokens, inputs.attention_mask) == (5, None)
    assert inputs.context is not None
    assert inputs.context.cu_seqlens.tolist() == [0, 3, 5]
    assert (inputs.context.max_seqlen, inputs.context.ops) == (3, ops)
    assert inputs.context.edges == (0, 3, 5)  # on the host, so that nothing waits for the device
    assert inputs.context.positions is not None
    assert inputs.context.positions.tolist() == [0, 1, 2, 0, 1]
    assert PackedInputs().ops == LocalOps()


def test_alignment_padding_is_not_counted() -> None:
    inputs = PackedInputs().inputs(micro_batch(align=4))
    assert inputs.tokens == 8
    assert inputs.counted.tolist() == [True] * 3 + [False] + [True] * 2 + [False] * 2
    assert inputs.rows.tolist() == [1, 4]


def test_padded() -> None:
    inputs = PaddedInputs().inputs(micro_batch())
    assert lists(inputs, NAMES) == [
        [[10, 11, 12], [20, 21, 0]],
        [[0, 1, 2], [0, 1, 0]],
        [1, 3],  # of the flattened rows
        [12, 21],
        [2, 4],  # of the packed tokens
        [True] * 5 + [False],
    ]
    assert (inputs.tokens, inputs.context) == (5, None)
    assert inputs.attention_mask is not None
    assert inputs.attention_mask.tolist() == [[1, 1, 1], [1, 1, 0]]
    assert inputs.attention_mask.dtype == torch.int64


@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.sampled_from([1, 4]))
def test_hidden_states_before_the_scored_tokens_score_them(lengths: list[int], align: int) -> None:
    """In whatever order long and short rows come, packed and padded."""
    batch = tiny_batch(lengths)
    packed = pack_sequences(batch, align=align)
    one = MicroBatch(packed, tuple(range(len(lengths))), packed.values["loss_mask"], (0,))
    rows = [row.tolist() for row in batch["input_ids"].unbind()]
    masks = [row.tolist() for row in batch["loss_mask"].unbind()]
    pairs = [(ids[at - 1], ids[at]) for ids, mask in zip(rows, masks, strict=True) for at, on in enumerate(mask) if on]
    for builder in (PackedInputs(), PaddedInputs()):
        inputs = builder.inputs(one)
        before = inputs.input_ids.flatten()[inputs.rows].tolist()
        assert list(zip(before, inputs.targets.tolist(), strict=True)) == pairs
        assert packed.values["input_ids"][inputs.slots].tolist() == inputs.targets.tolist()
        assert int(inputs.counted.sum()) == sum(lengths)


def test_positions_of_the_batch_one_row_an_axis() -> None:
    positions = [torch.arange(3).expand(3, 3) + 5, torch.arange(2).expand(3, 2) * torch.tensor([[1], [2], [3]])]
    one = micro_batch(position_ids=[positions[0].contiguous(), positions[1].contiguous()])
    flat = [[5, 6, 7, 0, 1], [5, 6, 7, 0, 2], [5, 6, 7, 0, 3]]
    assert PackedInputs().inputs(one).position_ids.tolist() == flat
    padded = PaddedInputs().inputs(one)
    assert padded.position_ids.tolist() == [[row[:3], [*row[3:], 0]] for row in flat]
    assert padded.input_ids.tolist() == [[10, 11, 12], [20, 21, 0]]


@pytest.mark.parametrize("builder", [PackedInputs(), PaddedInputs()])
def test_a_dummy_scores_and_counts_nothing(builder: PackedInputs | PaddedInputs) -> None:
    packed = dummy_micro_batch(view_batch(make_batch([{"input_ids": IDS[0], "loss_mask": MASKS[0]}])))
    inputs = builder.inputs(MicroBatch(packed, (), torch.zeros(1, dtype=torch.bool), (0,)))
    assert inputs.rows.numel() == inputs.targets.numel() == 0
    assert inputs.counted.tolist() == [False]
    assert builder.collect(torch.zeros(0), inputs).tolist() == [0.0]


@pytest.mark.parametrize("builder", [PackedInputs(), PaddedInputs()])
def test_scores_come_back_to_their_tokens(builder: PackedInputs | PaddedInputs) -> None:
    inputs = builder.inputs(micro_batch())
    scores = torch.tensor([-1.5, -2.5], dtype=torch.float64, requires_grad=True)
    out = builder.collect(scores, inputs)
    assert out.tolist() == [0, 0, -1.5, 0, -2.5]
    assert out.dtype == torch.float64
    (out * torch.arange(5)).sum().backward()
    assert scores.grad is not None
    assert scores.grad.tolist() == [2, 4]
    assert builder.total(out, inputs) is out
