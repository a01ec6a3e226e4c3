"""Rows that ranks hold: what is refused, what is required, and the facts that they gather, against the whole batch."""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Never

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict

from engines.execution.local_batch import LocalBatch, check_held, gather_row_stats, row_stats
from engines.tiny import tiny_batch
from seqpack import Totals, view_batch
from seqpack.batches.batch import jagged

CPU = torch.device("cpu")


def part(batch: TensorDict, rows: tuple[int, ...]) -> LocalBatch:
    return LocalBatch(view_batch(batch).select(rows), rows, view_batch(batch).lengths)


def test_rows_are_tuples_and_have_places() -> None:
    batch = tiny_batch([4, 6, 5])
    local = LocalBatch(view_batch(batch).select([2, 0]), (2, 0), (4, 6, 5))
    assert (local.rows, local.lengths) == ((2, 0), (4, 6, 5))
    assert local.view.lengths == (5, 4)
    assert local.view is local.view
    assert local.places([0, 2, 2]) == [1, 0, 0]
    with pytest.raises(KeyError):
        local.places([1])


@pytest.mark.parametrize(
    ("rows", "lengths", "message"),
    [
        ((0,), (5, 3), "^rows names 1 rows of the global batch, this rank's batch has 2$"),
        ((0, 1, 2), (5, 3, 4), "^rows names 3 rows"),
        ((1, 1), (5, 3), "^rows names a row of the global batch twice$"),
        ((0, 2), (5, 3), "^row 2 is not in the global batch of 2 rows$"),
        ((0, -1), (5, 3), "^row -1 is not in the global batch of 2 rows$"),
        ((0, 1), (5, 4), "^row 1 has 3 tokens here, lengths says 4$"),
    ],
)
def test_rows_that_do_not_fit(rows: tuple[int, ...], lengths: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LocalBatch(tiny_batch([5, 3]), rows, lengths)


def test_row_zero_and_the_last_row_fit() -> None:
    assert LocalBatch(tiny_batch([3, 5]), (2, 0), (5, 9, 3)).rows == (2, 0)


def test_what_is_required() -> None:
    local = part(tiny_batch([5, 3]).select("input_ids", "loss_mask"), (0, 1))
    local.require(())
    local.require(("loss_mask", "input_ids"))
    with pytest.raises(ValueError, match=r"^the batch lacks advantages, reward; it has input_ids, loss_mask$"):
        local.require(("advantages", "loss_mask", "reward"))
    batch = tiny_batch([5, 3]).select("input_ids", "loss_mask")
    for key in ("pixel_values", "image_grid_thw"):
        batch[key] = jagged([torch.zeros(2, 4)] * 2, 0)
    with pytest.raises(ValueError, match=r"alone, the batch has image_grid_thw, pixel_values: leave them out, or set"):
        part(batch, (0, 1)).require(("loss_mask",))


def test_facts_of_a_whole_batch() -> None:
    view = view_batch(tiny_batch([5, 3, 4]))
    assert row_stats(view, None).zero_gradient == frozenset()
    facts = row_stats(view, torch.tensor([True, False, True]))
    assert (facts.zero_gradient, facts.totals) == (frozenset({0, 2}), view.totals)


class Ranks:
    """The ranks of a plan in one process: `dist.all_reduce` takes the maximum of what each of them brings."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size = size
        self.brought: list[torch.Tensor] = []
        self.groups: list[Any] = []
        self.reduced: torch.Tensor | None = None
        monkeypatch.setattr(torch.distributed, "all_reduce", self.all_reduce)

    def all_reduce(self, values: torch.Tensor, op: Any = None, group: Any = None) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        self.groups.append(group)
        self.brought.append(values.clone())
        if self.reduced is not None:
            values.copy_(self.reduced)

    def of(self, index: int) -> Any:
        return SimpleNamespace(layout=SimpleNamespace(plan_size=self.size), plan="the plan's", plan_index=index)

    def run(self, call: Callable[[int, Any], Any]) -> list[Any]:
        """The result or error of each rank; what a rank brings does not depend on the others."""
        results: list[Any] = []
        for final in (False, True):
            results = []
            for index in range(self.size):
                try:
                    results.append(call(index, self.of(index)))
                except ValueError as error:
                    results.append(str(error))
            if not final and self.brought:
                self.reduced = torch.stack(self.brought).amax(0)
        return results


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as made:
        yield made


@settings(deadline=None, max_examples=25)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(1, 3), st.booleans(), st.data())
def test_gathered_facts_are_those_of_the_whole_batch(
    lengths: list[int], size: int, grouped: bool, data: st.DataObject
) -> None:
    batch = tiny_batch(lengths, seed=data.draw(st.integers(0, 9)))
    batch["loss_mask"] = jagged([row & (i % 3 != 1) for i, row in enumerate(batch["loss_mask"].unbind())])
    batch = batch if grouped else batch.exclude("group")
    if data.draw(st.booleans()):
        episodes = st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths))
        batch["episode"] = torch.tensor(data.draw(episodes))
    zero = torch.tensor(data.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths))))
    skip = data.draw(st.booleans())
    owner = data.draw(st.lists(st.integers(0, size - 1), min_size=len(lengths), max_size=len(lengths)))
    parts = []
    for index in range(size):
        rows = {row for row, rank in enumerate(owner) if rank == index} | data.draw(
            st.sets(st.integers(0, len(lengths) - 1), min_size=1)
        )
        parts.append(tuple(data.draw(st.permutations(sorted(rows)))))
    with pytest.MonkeyPatch.context() as patch:
        ranks = Ranks(patch, size)

        def call(index: int, groups: Any) -> Any:
            one = part(batch, parts[index])
            own = zero[list(parts[index])] if skip else None
            return gather_row_stats(one, own, [row for row in parts[index] if owner[row] == index], groups, CPU)

        results = ranks.run(call)
    want = row_stats(view_batch(batch), zero if skip else None)
    assert results == [want] * size
    assert set(ranks.groups) == (set() if size == 1 else {"the plan's"})


def test_a_row_that_no_rank_holds_counts_nothing(patch: pytest.MonkeyPatch) -> None:
    """Rows that nobody computes may be held by nobody: they are not trained, and are in no group."""
    batch = tiny_batch([5, 4, 6])
    (stats,) = Ranks(patch, 1).run(lambda _, groups: gather_row_stats(part(batch, (0, 2)), None, [0, 2], groups, CPU))
    one, other = (view_batch(batch).select([row]).totals for row in (0, 2))
    assert stats.totals == Totals(one.tokens + other.tokens, 2, 2)
    assert stats.zero_gradient == frozenset()


def test_large_group_numbers_stay_apart(patch: pytest.MonkeyPatch) -> None:
    """Hashes serve as numbers: neighbours of 2**40 are one in float32, those of 2**60 in float64."""
    batch = tiny_batch([5, 4, 6, 3])
    batch["group"] = torch.tensor([2**40, 2**40 + 1, 2**60, 2**60 + 1])
    call = lambda _, groups: gather_row_stats(part(batch, (0, 1, 2, 3)), None, [0], groups, CPU)  # noqa: E731
    assert [one.totals for one in Ranks(patch, 2).run(call)] == [view_batch(batch).totals] * 2
    assert view_batch(batch).totals.groups == 4


def test_facts_are_exchanged_where_the_group_is(patch: pytest.MonkeyPatch) -> None:
    class ExchangedError(Exception):
        pass

    def all_reduce(values: torch.Tensor, op: Any, group: Any) -> Never:
        raise ExchangedError(values.device.type)

    groups, batch = Ranks(patch, 2).of(0), tiny_batch([5, 4])
    patch.setattr(torch.distributed, "all_reduce", all_reduce)
    for call in (
        lambda: gather_row_stats(part(batch, (0, 1)), None, [0], groups, torch.device("meta")),
        lambda: check_held(part(batch, (0, 1)), [0], groups, torch.device("meta")),
    ):
        with pytest.raises(ExchangedError, match=r"^meta$"):
            call()


@pytest.mark.parametrize("key", ["loss_mask", "group", "zero"])
def test_rows_that_differ_are_named_on_every_rank(patch: pytest.MonkeyPatch, key: str) -> None:
    batch, other = tiny_batch([5, 4, 6]), tiny_batch([5, 4, 6])
    zero, odd = torch.tensor([False, False, False]), torch.tensor([False, False, False])
    if key == "loss_mask":
        other["loss_mask"] = jagged([row & (i != 1) for i, row in enumerate(batch["loss_mask"].unbind())])
    elif key == "group":
        other["group"] = torch.tensor([0, 7, 1])
    else:
        odd = torch.tensor([False, True, False])
    inputs = [(batch, zero), (other, odd)]

    def call(index: int, groups: Any) -> Any:
        whole, mask = inputs[index]
        return gather_row_stats(part(whole, (0, 1, 2)), mask, [index], groups, CPU)

    want = "ranks hold different rows under the number 1: number the rows alike on every rank"
    assert Ranks(patch, 2).run(call) == [want] * 2


def test_a_rank_that_lacks_a_row_is_named_on_every_rank(patch: pytest.MonkeyPatch) -> None:
    batch = tiny_batch([5, 4, 6])
    for lacking, needed in ((None, [[0], [1]]), (0, [[2], [1]]), (1, [[0], [2, 1]])):

        def facts(index: int, groups: Any, needed: list[list[int]] = needed) -> Any:
            return gather_row_stats(part(batch, (0, 1)), None, needed[index], groups, CPU).zero_gradient

        def held(index: int, groups: Any, needed: list[list[int]] = needed) -> None:
            return check_held(part(batch, (0, 1)), needed[index], groups, CPU)

        want = f"rank {lacking} of the plan lacks a row that it is to compute: give each rank at least "
        want += "engine.plan(lengths).rows_of(rank)"
        expected: list[Any] = [frozenset()] * 2 if lacking is None else [want] * 2
        assert Ranks(patch, 2).run(facts) == expected
        ranks = Ranks(patch, 2)
        assert ranks.run(held) == ([None] * 2 if lacking is None else [want] * 2)
        assert set(ranks.groups) == {"the plan's"}
    alone = Ranks(patch, 1)
    assert alone.run(lambda _, groups: check_held(part(batch, (1,)), [1], groups, CPU)) == [None]
    assert "rank 0 of the plan lacks" in alone.run(lambda _, groups: check_held(part(batch, (1,)), [0], groups, CPU))[0]
    assert alone.brought == []
