"""The loss of a micro-batch: shares, what the model adds, and dummies that stay connected."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines.execution.executor import Scores
from engines.execution.loss import StepLoss, check_objective
from engines.execution.micro_batches import MicroBatch
from seqpack import Totals, pack_sequences
from seqpack.batches.batch import make_batch

NAMES = ("required_keys", "needs_entropy", "zero_gradient_rows", "__call__")


def micro_batch(ranks: tuple[int, ...] = (0,)) -> MicroBatch:
    batch = make_batch([{"input_ids": [1, 2, 3], "loss_mask": [False, True, True]}])
    packed = pack_sequences(batch)
    return MicroBatch(packed, (0,), packed.values["loss_mask"], ranks)


def objective(
    loss: Callable[[torch.Tensor], torch.Tensor], metrics: dict[str, torch.Tensor], seen: list[Any] | None = None
) -> Any:
    def call(*args: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        if seen is not None:
            seen.append(args)
        return loss(args[0]), metrics

    return call


def test_an_objective_gets_scores_batch_and_totals() -> None:
    one, totals = micro_batch(), Totals(5, 3, 2)
    seen: list[Any] = []
    log_probs, entropy = torch.tensor([0.0, -1.0, -2.0], requires_grad=True), torch.ones(3)
    step = StepLoss(objective(lambda x: x.sum(), {"some": torch.tensor(2.0)}, seen), totals)
    loss = step(one, Scores(log_probs, entropy))
    assert seen == [(log_probs, entropy, one.packed, totals)]
    assert all(got is want for got, want in zip(seen[0], (log_probs, entropy, one.packed, totals), strict=True))
    loss.backward()
    assert log_probs.grad is not None
    assert torch.equal(log_probs.grad, torch.ones(3))
    assert step.metrics._sums == {"some": 2.0, "loss": -3.0}


def test_a_ranks_share_is_the_sum_of_its_losses() -> None:
    step = StepLoss(objective(lambda x: x.sum(), {"some": torch.tensor(2.0)}), Totals(1, 1))
    assert step.share(torch.device("cpu")) == 0.0
    for log_prob in (-4.0, -1.0):
        step(micro_batch(ranks=(0, 1)), Scores(torch.full((2,), log_prob, requires_grad=True)))
    share = step.share(torch.device("cpu"))
    assert (share.item(), share.shape, share.dtype) == (-5.0, (), torch.float64)


def test_what_the_model_adds_is_part_of_loss_and_metrics() -> None:
    log_probs = torch.tensor([0.0, -1.0], requires_grad=True)
    auxiliary = 3 * torch.tensor(0.5, requires_grad=True)
    step = StepLoss(objective(lambda x: x.sum(), {"some": torch.tensor(2.0)}), Totals(1, 1))
    assert step(micro_batch(), Scores(log_probs, None, auxiliary)).item() == 0.5
    assert step.metrics._sums == {"some": 2.0, "loss": 0.5, "auxiliary_loss": 1.5}


def test_ranks_that_share_a_micro_batch_share_its_metrics_and_not_its_loss() -> None:
    step = StepLoss(objective(lambda x: x.sum(), {"some": torch.tensor(2.0)}), Totals(1, 1))
    loss = step(micro_batch(ranks=(0, 1, 2, 3)), Scores(torch.full((2,), -4.0, requires_grad=True)))
    assert loss.item() == -8.0
    assert step.metrics._sums == {"some": 0.5, "loss": -2.0}


def test_a_loss_without_the_log_probs_is_connected_to_them() -> None:
    log_probs = torch.zeros(2, requires_grad=True)  # those of a dummy
    loss = StepLoss(objective(lambda x: torch.tensor(7.0), {}), Totals(1, 1))(micro_batch(), Scores(log_probs))
    assert loss.item() == 7.0
    loss.backward()
    assert log_probs.grad is not None
    assert torch.equal(log_probs.grad, torch.zeros(2))


def test_a_loss_that_is_no_scalar_is_refused() -> None:
    step = StepLoss(objective(lambda x: x, {}), Totals(1, 1))
    with pytest.raises(ValueError, match=r"must return a scalar loss, its shape is \(2,\)"):
        step(micro_batch(), Scores(torch.zeros(2, requires_grad=True)))


def test_what_an_objective_lacks_is_named() -> None:
    class Whole:
        required_keys, needs_entropy, zero_gradient_rows = (), False, None

        def __call__(self) -> None:
            """Nothing is called here."""

    whole: Any = Whole()
    check_objective(whole)
    for name in NAMES[:3]:
        known = {other: None for other in NAMES[:3] if other != name}
        lacking = type("Lacking", (), {**known, "__call__": lambda self: None})()
        with pytest.raises(ValueError, match=f"^Lacking is no objective, it lacks {name}: see seqpack.Objective$"):
            check_objective(lacking)
    with pytest.raises(ValueError, match=r"^SimpleNamespace is no objective, it lacks __call__"):
        check_objective(SimpleNamespace(required_keys=(), needs_entropy=False, zero_gradient_rows=None))


def test_an_objective_takes_no_name_of_the_steps_metrics() -> None:
    step = StepLoss(objective(torch.sum, {"tokens": torch.tensor(1.0), "mine": torch.tensor(1.0)}), Totals(5, 3, 2))
    scores = Scores(torch.zeros(3, requires_grad=True), None)
    with pytest.raises(ValueError, match="the objective reports tokens, which the step reports itself"):
        step(micro_batch(), scores)
