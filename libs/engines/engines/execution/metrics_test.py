"""Metrics add up by shape and name alone, and what cannot add up is refused."""

from typing import Any, Never

import pytest
import torch

from engines.execution.metrics import MetricSum, agreed_number, check_agreement
from engines.testing.one_rank import one_rank  # noqa: F401  each test here has a group


def test_scalars_add_pairs_divide_maxima_stay() -> None:
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
def test_what_does_not_add_up(metrics: dict[str, Any], message: str) -> None:
    collected = MetricSum()
    if "b" in metrics:
        collected.add({"a": torch.zeros(())})
    with pytest.raises(ValueError, match=message):
        collected.add(metrics)


def test_one_rank_agrees_with_itself() -> None:
    check_agreement(2**52 - 1, "anything", torch.device("cpu"))


def test_shares_scale_sums_and_not_maxima() -> None:
    collected = MetricSum()
    collected.add({"sum": torch.tensor(2.0), "mean": torch.tensor([3.0, 4.0]), "gap/max": torch.tensor(5.0)}, 0.5)
    collected.add({"sum": torch.tensor(2.0), "mean": torch.tensor([3.0, 2.0]), "gap/max": torch.tensor(-1.0)}, 0.25)
    reduced = collected.reduce()
    assert reduced == {"sum": 1.5, "mean": pytest.approx(2.25 / 2.5), "gap/max": 5.0}
    assert all(value.dtype == torch.float64 for value in collected._sums.values())


def test_some_kinds_alone() -> None:
    assert MetricSum().reduce() == {}
    one = MetricSum()
    one.add({"b/max": torch.tensor(-2.0), "a/max": torch.tensor(-3.0)})
    assert one.reduce() == {"a/max": -3.0, "b/max": -2.0}
    two = MetricSum()
    two.add({"b": torch.tensor([1.0, 4.0]), "a": torch.tensor(7.0), "c": torch.tensor(8.0)})
    assert two.reduce() == {"a": 7.0, "b": 0.25, "c": 8.0}


def test_the_sum_of_one_key() -> None:
    """Of this rank alone, before anything is exchanged; a rank without micro-batches has 0, where its model is."""
    collected, meta = MetricSum(), torch.device("meta")
    empty = collected.sum_of("loss", meta)
    assert (empty.shape, empty.dtype, empty.device) == ((), torch.float64, meta)
    assert collected.sum_of("loss", torch.device("cpu")) == 0.0
    for value in (2.0, 3.0):
        collected.add({"loss": torch.tensor(value), "mean": torch.tensor([value, 1.0])})
    assert collected.sum_of("loss", meta) == 5.0
    assert collected.sum_of("mean", meta).tolist() == [5.0, 2.0]
    assert collected.sum_of("other", torch.device("cpu")) == 0.0


def test_a_metric_takes_no_gradient_along() -> None:
    collected = MetricSum()
    collected.add({"a": torch.ones((), requires_grad=True) * 2, "a/max": torch.ones((), requires_grad=True) * 2})
    assert not any(value.requires_grad for value in collected._sums.values())


@pytest.mark.parametrize(
    ("metrics", "key"),
    [({"a": torch.zeros(()), "c": torch.zeros(())}, "'c'"), ({}, "'a'"), ({"A": torch.ones(2)}, "'A'")],
)
def test_the_odd_key_is_named(metrics: dict[str, Any], key: str) -> None:
    collected = MetricSum()
    collected.add({"a": torch.zeros(())})
    with pytest.raises(ValueError, match=f"same metrics for every micro-batch; {key} is not in all"):
        collected.add(metrics)
    with pytest.raises(ValueError, match=r"^metric 'x/max' must be a scalar or .*, its shape is \(2,\)"):
        MetricSum().add({"x/max": torch.zeros(2)})


# Names stand for process groups: nothing is exchanged.
BOTH: Any = "both"
ALONE: Any = "alone"


@pytest.fixture
def two_ranks(monkeypatch: pytest.MonkeyPatch) -> tuple[list[list[float]], list[Any]]:
    """Another rank, which holds `other`; what was exchanged is in `calls`."""
    other: list[list[float]] = []
    calls: list[Any] = []

    def all_reduce(values: torch.Tensor, op: Any, group: Any) -> None:
        calls.append((op, group))
        brought = torch.tensor(other.pop(0), dtype=values.dtype)
        values.copy_(values + brought if op == torch.distributed.ReduceOp.SUM else torch.maximum(values, brought))

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2 if group == BOTH else 1)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group=None: "cpu:gloo")
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    return other, calls


def test_ranks_are_added_up(two_ranks: tuple[list[list[float]], list[Any]]) -> None:
    other, calls = two_ranks
    other += [[10.0, 1.0, 3.0], [0.5, -9.0]]
    one = MetricSum()
    one.add(
        {"a": torch.tensor(7.0), "b": torch.tensor([2.0, 1.0]), "m/max": torch.tensor(0.0), "n/max": torch.tensor(-8.0)}
    )
    assert one.reduce(BOTH) == {"a": 17.0, "b": 0.75, "m/max": 0.5, "n/max": -8.0}
    assert calls == [(torch.distributed.ReduceOp.SUM, BOTH), (torch.distributed.ReduceOp.MAX, BOTH)]
    assert one.reduce(ALONE) == {"a": 7.0, "b": 2.0, "m/max": 0.0, "n/max": -8.0}


@pytest.mark.parametrize("theirs", [-1, 0, 1, 2**52 - 1])
def test_ranks_that_disagree_raise(two_ranks: tuple[list[list[float]], list[Any]], theirs: int) -> None:
    other, calls = two_ranks
    mine = 2**52 - 2
    for number in (mine, mine + theirs):
        other.append([float(number), -float(number)])
    check_agreement(mine, "the plan", torch.device("cpu"), BOTH)
    assert calls == [(torch.distributed.ReduceOp.MAX, BOTH)]
    if theirs:
        with pytest.raises(RuntimeError, match=r"^ranks disagree on the plan: every rank must be given the same"):
            check_agreement(mine, "the plan", torch.device("cpu"), BOTH)
    else:
        check_agreement(mine, "the plan", torch.device("cpu"), BOTH)
    check_agreement(mine, "the plan", torch.device("cpu"), ALONE)
    assert len(calls) == 2


@pytest.mark.parametrize(
    ("backend", "place"), [("cuda:nccl", "meta"), ("cpu:gloo,cuda:nccl", "cpu"), ("cpu:gloo", "cpu")]
)
def test_the_number_is_exchanged_by_the_host_where_the_group_can(
    monkeypatch: pytest.MonkeyPatch, backend: str, place: str
) -> None:
    class ExchangedError(Exception):
        pass

    def all_reduce(values: torch.Tensor, op: Any, group: Any) -> Never:
        raise ExchangedError(values.device.type, values.dtype)

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda group=None: backend)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    with pytest.raises(ExchangedError) as raised:
        check_agreement(7, "the plan", torch.device("meta"), BOTH)
    assert raised.value.args == (place, torch.float64)


def test_facts_become_the_same_number_everywhere() -> None:
    """From SHA-256, and so not from Python's own hashes, which differ between processes."""
    assert agreed_number(("whole", 7, (1, 2))) == 738318689090192
    assert len({agreed_number(fact) for fact in (1, 2, "1", (1,), ((1,),))}) == 5
    assert all(0 <= agreed_number(fact) < 2**52 for fact in range(500))
    assert max(agreed_number(fact) for fact in range(500)) > 2**51
