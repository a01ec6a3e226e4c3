"""SFT is cross-entropy on the trained tokens."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from objectives import SFT, Totals
from objectives.losses import Aggregation
from seqpack import make_batch, pack_sequences
from seqpack.batches.batch import jagged

LENGTHS = [5, 3, 1, 8, 4]


def batch_and_scores() -> tuple[TensorDict, list[Tensor]]:
    rng = torch.Generator().manual_seed(0)
    rows = [
        {"input_ids": torch.arange(n), "loss_mask": (torch.arange(n) > 0) & (torch.rand(n, generator=rng) < 0.7)}
        for n in LENGTHS
    ]
    return make_batch(rows), [-torch.rand(n, generator=rng, dtype=torch.float64) for n in LENGTHS]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("parts", [[[0, 1, 2, 3, 4]], [[4, 0], [2], [1, 3]]])
def test_loss_gradient_and_metric(aggregation: Aggregation, parts: list[list[int]], weighted: bool) -> None:
    batch, scores = batch_and_scores()
    weights = [torch.linspace(0, 3 if n % 2 else 0, n) if weighted else torch.ones(n) for n in LENGTHS]
    if weighted:
        batch["loss_weights"] = jagged(weights)
    leaves = [row.clone().requires_grad_() for row in scores]
    loss, nll = torch.zeros((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for part in parts:
        packed = pack_sequences(batch, part)
        share, metrics = SFT(aggregation)(torch.cat([leaves[i] for i in part]), None, packed, Totals.of(batch))
        loss, nll = loss + share, nll + metrics["nll"]
        assert not metrics["nll"].requires_grad
    grads = torch.autograd.grad(loss, leaves)
    masks = [mask.tolist() for mask in batch["loss_mask"].unbind()]
    used = [mask for mask in masks if any(mask)]
    tokens = sum(map(sum, masks))
    parts_of: dict[Aggregation, Callable[[list[bool]], float]] = {
        "token": lambda _: 1 / tokens,
        "sequence": lambda mask: 1 / (sum(mask) * len(used)),
    }
    part_of = parts_of[aggregation]
    want = 0.0
    for mask, row, grad, factors in zip(masks, scores, grads, weights, strict=True):
        parts_of_loss = [part_of(mask) * float(w) if on else 0.0 for w, on in zip(factors, mask, strict=True)]
        want -= sum(part * float(x) for part, x in zip(parts_of_loss, row, strict=True))
        assert grad.tolist() == pytest.approx([-part for part in parts_of_loss])
    without = [not any(mask) or bool((w == 0).all()) for mask, w in zip(masks, weights, strict=True)]
    assert SFT(aggregation).zero_gradient_rows(batch).tolist() == without
    assert float(loss.detach()) == pytest.approx(want, rel=1e-12)
    trained = torch.cat(scores)[torch.cat(list(batch["loss_mask"].unbind()))]
    assert nll.tolist() == pytest.approx([-float(trained.sum()), tokens])


def test_it_needs_nothing_more() -> None:
    assert SFT().required_keys == ()
    assert SFT().needs_entropy is False
    batch, _ = batch_and_scores()
    assert SFT().zero_gradient_rows(batch).tolist() == [not bool(mask.any()) for mask in batch["loss_mask"].unbind()]


@pytest.mark.parametrize("aggregation", ["constant", "mean", "", None])
def test_other_aggregations_are_refused(aggregation: Any) -> None:
    with pytest.raises(ValueError, match=r"^unknown aggregation of SFT .*: use one of token, sequence$"):
        SFT(aggregation=aggregation)
