"""DPO against its formula in Python floats; as advantages, its gradient whatever the split into micro-batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from objectives import GRPO, Totals
from objectives.preference import dpo_advantages, dpo_loss
from seqpack import index_select, make_batch, pack_sequences

number = st.floats(-30, 0)


@given(st.lists(st.tuples(number, number, number, number), min_size=1, max_size=6), st.sampled_from([0.0, 0.2]))
def test_the_loss_is_the_papers(pairs: list[tuple[float, float, float, float]], smoothing: float) -> None:
    def formula(good: float, bad: float, ref_good: float, ref_bad: float) -> float:
        margin = 0.3 * ((good - ref_good) - (bad - ref_bad))
        return sum(share * math.log1p(math.exp(-x)) for share, x in ((1 - smoothing, margin), (smoothing, -margin)))

    good, bad, ref_good, ref_bad = torch.tensor(pairs, dtype=torch.float64).T
    got = dpo_loss(good, bad, ref_good, ref_bad, beta=0.3, label_smoothing=smoothing)
    assert got.tolist() == pytest.approx([formula(*pair) for pair in pairs], rel=1e-9, abs=1e-12)


def pairs_of_rows() -> tuple[list[dict[str, object]], list[Tensor]]:
    """Three pairs whose rows stand apart, of several lengths."""
    draw = torch.Generator().manual_seed(0)
    rows, log_probs = [], []
    for pair, chosen, length in [(7, True, 4), (2, False, 6), (5, True, 3), (2, True, 5), (7, False, 2), (5, False, 7)]:
        log_probs.append(-torch.rand(length, generator=draw))
        rows.append(
            {
                "input_ids": list(range(length)),
                "loss_mask": [False] + [True] * (length - 1),
                "pair": pair,
                "chosen": chosen,
                "ref_log_probs": -torch.rand(length, generator=draw),
            }
        )
    return rows, log_probs


def test_as_advantages_it_has_the_gradient_of_the_mean_over_pairs_in_any_split() -> None:
    rows, log_probs = pairs_of_rows()
    batch = make_batch(rows)
    jagged = torch.nested.nested_tensor(log_probs, layout=torch.jagged)
    order = (batch["pair"], batch["chosen"])
    batch["advantages"] = dpo_advantages(jagged, batch["ref_log_probs"], batch["loss_mask"], *order, beta=0.5)

    leaves = [values.double().requires_grad_() for values in log_probs]
    sums = {(r["pair"], r["chosen"]): leaf[1:].sum() for r, leaf in zip(rows, leaves, strict=True)}
    references = {(r["pair"], r["chosen"]): r["ref_log_probs"][1:].double().sum() for r in rows}  # type: ignore[index]
    wanted = torch.stack(
        [
            dpo_loss(sums[p, True], sums[p, False], references[p, True], references[p, False], beta=0.5)
            for p in (2, 5, 7)
        ]
    )
    want = torch.autograd.grad(wanted.mean(), leaves)

    objective, totals = GRPO(aggregation="constant", max_tokens=1), Totals.of(batch)
    for split in ([[0, 1, 2, 3, 4, 5]], [[0], [1, 5], [2, 3], [4]]):
        got: dict[int, Tensor] = {}
        for part in split:
            packed = pack_sequences(index_select(batch, part))
            current = torch.cat([log_probs[row] for row in part]).requires_grad_()
            loss, _ = objective(current, None, packed, totals)
            (gradient,) = torch.autograd.grad(loss, current)
            got |= dict(zip(part, gradient.split([len(log_probs[row]) for row in part]), strict=True))
        for row, gradient in enumerate(want):
            torch.testing.assert_close(got[row].double(), gradient, rtol=1e-5, atol=1e-7)


def test_half_a_pair_is_refused() -> None:
    mask = torch.nested.nested_tensor([torch.ones(2, dtype=torch.bool)] * 4, layout=torch.jagged)
    zero = mask.float()
    for pair, chosen in [([1, 1, 2, 2], [1, 1, 1, 0]), ([1, 2, 2, 3], [1, 1, 0, 0]), ([1, 1, 1, 1], [1, 0, 1, 0])]:
        with pytest.raises(ValueError, match="each pair needs"):
            dpo_advantages(zero, zero, mask, torch.tensor(pair), torch.tensor(chosen).bool())
