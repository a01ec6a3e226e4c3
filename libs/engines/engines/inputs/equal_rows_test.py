"""Equal rows enter the model once: scores and gradients stay those of all rows, held to padded rows one by one."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engines import EngineConfig, build_engine
from engines.execution.micro_batches import MicroBatch
from engines.inputs.equal_rows import inputs_of_distinct_rows
from engines.inputs.model_inputs import ModelInputs, PackedInputs
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_model
from objectives import GRPO
from seqpack import pack_sequences
from seqpack.batches.batch import make_batch

Row = tuple[list[int], list[bool]]
"""Tokens, and which of them are trained."""

ROWS: list[Row] = [
    ([5, 6, 7, 8], [False, False, True, True]),
    ([5, 6, 9], [False, False, True]),
    ([5, 6, 7, 8], [False, False, True, True]),
    ([5, 6, 7, 8], [False, False, False, True]),  # the same tokens, others of them trained
    ([5, 6, 9], [False, False, True]),
    ([5, 6, 7, 8], [False, False, True, True]),
]
DISTINCT = 3


def packed_rows(rows: list[Row], align: int = 1, **more: list[Any]) -> MicroBatch:
    samples = [
        {"input_ids": ids, "loss_mask": mask, **{key: values[row] for key, values in more.items()}}
        for row, (ids, mask) in enumerate(rows)
    ]
    packed = pack_sequences(make_batch(samples), align=align)
    return MicroBatch(packed, tuple(range(len(rows))), packed.values["loss_mask"], (0,))


def grpo_batch(rows: list[Row]) -> Any:
    return make_batch(
        [
            {
                "input_ids": ids,
                "loss_mask": mask,
                "advantages": torch.full((len(ids),), 0.5 - place),
                "rollout_log_probs": torch.full((len(ids),), -1.0 - 0.1 * place),
                "group": 0,
            }
            for place, (ids, mask) in enumerate(rows)
        ]
    )


def entered(micro_batch: MicroBatch) -> tuple[ModelInputs, list[list[int]]]:
    """The inputs, and the rows that the model reads."""
    inputs = inputs_of_distinct_rows(micro_batch, PackedInputs().inputs)
    assert inputs.context is not None
    edges = inputs.context.cu_seqlens.tolist()
    ids = inputs.input_ids.tolist()
    return inputs, [ids[a:b] for a, b in itertools.pairwise(edges)]


def test_by_hand() -> None:
    inputs, rows = entered(packed_rows(ROWS))
    assert rows == [[5, 6, 7, 8], [5, 6, 9], [5, 6, 7, 8]]
    assert inputs.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3]
    assert inputs.targets.tolist() == [7, 8, 9, 8]
    assert inputs.copies is not None
    assert inputs.copies.tolist() == [0, 1, 2, 0, 1, 3, 2, 0, 1]
    assert inputs.tokens == sum(len(ids) for ids, _ in ROWS)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.booleans()), min_size=1, max_size=8))
def test_each_token_has_the_score_of_its_own_row(drawn: list[tuple[int, int, bool]]) -> None:
    """A score that names row and place (the sum of what came before, and the token) comes to all tokens like it."""
    rows: list[Row] = [([3 + kind, *range(length)], [False] + [on] * length) for length, kind, on in drawn]
    one = packed_rows(rows)
    builder = PackedInputs()
    inputs, _ = entered(one)
    ids = inputs.input_ids.tolist()
    edges = inputs.context.cu_seqlens.tolist() if inputs.context is not None else []
    begins = [max(edge for edge in edges if edge <= row) for row in inputs.rows.tolist()]
    sums = [sum(ids[begin : row + 1]) for begin, row in zip(begins, inputs.rows.tolist(), strict=True)]
    scores = torch.tensor([100 * a + b for a, b in zip(sums, inputs.targets.tolist(), strict=True)]).float()
    wanted = [float(100 * sum(row[:at]) + row[at]) if on else 0.0 for row, mask in rows for at, on in enumerate(mask)]
    assert builder.collect(scores, inputs).tolist() == wanted
    assert len(set(zip(begins, inputs.rows.tolist(), strict=True))) == len(begins)  # each is read once


def test_rows_at_other_positions_are_others() -> None:
    positions = [list(range(len(ids))) for ids, _ in ROWS]
    positions[5] = [1, 2, 3, 4]
    inputs, rows = entered(packed_rows(ROWS, position_ids=positions))
    assert len(rows) == DISTINCT + 1
    assert inputs.position_ids.tolist()[-4:] == [1, 2, 3, 4]


@pytest.mark.parametrize("one", [packed_rows(ROWS[1:4]), packed_rows(ROWS, align=8)])
def test_without_equal_rows_or_with_padding_all_enter(one: MicroBatch) -> None:
    inputs = inputs_of_distinct_rows(one, PackedInputs().inputs)
    assert inputs.copies is None
    assert inputs.input_ids.tolist() == one.packed.values["input_ids"].tolist()


def tokens_read(patch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each pass embeds, in the order of the passes."""
    seen: list[int] = []
    plain = torch.nn.Embedding.forward

    def forward(module: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.numel())
        return plain(module, ids)

    patch.setattr(torch.nn.Embedding, "forward", forward)
    return seen


@pytest.mark.parametrize("kind", ["dense", "attention", "moe"])
def test_steps_are_those_of_padded_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps with unequal advantages in equal rows, in one micro-batch; experts' routers see every row."""
    tokens = sum(len(ids) for ids, _ in ROWS)
    curves: list[Any] = []
    read: set[int] = set()
    for batching in ("packed", "padded"):
        config = EngineConfig(device="cpu", lr=1e-2, max_tokens_per_rank=tokens, batching=batching)
        built = build_engine(config, tiny_model(kind, scale=2.0))
        with monkeypatch.context() as patch:
            seen = tokens_read(patch)
            scores = built.forward(grpo_batch(ROWS), entropy=True)
            curves.append([built.train_batch(grpo_batch(ROWS), GRPO(entropy_coef=0.01)) for _ in range(3)])
        if batching == "packed":
            own, read = scores, set(seen)
    for key in ("log_probs", "entropy"):
        torch.testing.assert_close(own[key].values(), scores[key].values(), rtol=1e-5, atol=1e-5)
    for mine, other in zip(*curves, strict=True):
        for name in ("loss", "grad_norm", "entropy", "mismatch/kl"):
            assert mine[name] == pytest.approx(other[name], rel=2e-4, abs=1e-6), name
    every, few = tokens, 11
    assert (every in read, few in read) == (kind == "moe", kind != "moe")  # and rows that are checked again, alone
