"""Metrics add up by shape and name alone, and what cannot add up is refused."""

import pytest
import torch

from engines.execution.metrics import MetricSum, check_agreement
from engines.launch import ensure_group


@pytest.fixture(autouse=True, scope="module")
def group():
    made = ensure_group("cpu")
    yield
    if made:
        torch.distributed.destroy_process_group()


def test_scalars_add_pairs_divide_maxima_stay():
    collected = MetricSum()
    for value in (1.0, 3.0):
        collected.add(
            {
                "sum": torch.tensor(value),
                "mean": torch.tensor([value, 2.0]),
                "gap/max": torch.tensor(-value),
                "never": torch.tensor([0.0, 0.0]),
            }
        )
    assert collected.reduce() == {"sum": 4.0, "mean": 1.0, "gap/max": -1.0, "never": 0.0}


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"a": torch.zeros(3)}, "a scalar or a"),
        ({"a/max": torch.zeros(2)}, "a scalar or a"),
        ({"b": torch.zeros(())}, "same metrics for every micro-batch"),
    ],
)
def test_what_does_not_add_up(metrics, message):
    collected = MetricSum()
    if "b" in metrics:
        collected.add({"a": torch.zeros(())})
    with pytest.raises(ValueError, match=message):
        collected.add(metrics)


def test_one_rank_agrees_with_itself():
    check_agreement(2**52 - 1, "anything", torch.device("cpu"))
