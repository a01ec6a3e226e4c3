"""Which schedule a run's ledgers belong to, and what is said to who goes on by another."""

import re

import pytest

from schedules.config import Mode
from schedules.sampling.ledger_files import PER_RANK, SHARED, refusal

RANKS = [PER_RANK.format(0), PER_RANK.format(1)]
FOUND = {"sync": [], "one_step_off": RANKS, "fully_async": [SHARED]}


@pytest.mark.parametrize("after", FOUND)
@pytest.mark.parametrize("before", FOUND)
def test_a_run_goes_on_by_its_own_schedule_alone(before: Mode, after: Mode) -> None:
    world = 2 if after == "one_step_off" else 1
    found = refusal(FOUND[before], after, world, done=4)
    if before == after:
        assert found is None
    else:
        assert found is not None
        assert f"go on with --schedule.mode {before}" in found


def test_ranks_that_sampled_ahead_stay_as_many() -> None:
    assert (refusal(RANKS, "one_step_off", 1, 4) or "").endswith("go on with --nproc-per-node 2, not 1")
    assert (refusal(RANKS[:1], "one_step_off", 2, 4) or "").endswith("go on with --nproc-per-node 1, not 2")


@pytest.mark.parametrize("mode", FOUND)
def test_a_run_without_a_checkpoint_and_ledgers_begins_by_any(mode: Mode) -> None:
    assert refusal([], mode, 2, done=0) is None


@pytest.mark.parametrize(
    ("found", "mode", "world", "told"),
    [
        ([], "fully_async", 1, "no ledger: .* begun under sync .*, or ledger.bin was deleted: put it back"),
        ([], "one_step_off", 2, "or ledger-0.bin, ledger-1.bin was deleted: put it back"),
        (RANKS[1:], "one_step_off", 2, "^ledger-0.bin was deleted: put it back, or begin a new run"),
        (RANKS[:1], "one_step_off", 2, "has 1 ranks, .*, unless ledger-1.bin was deleted: then put it back"),
        ([PER_RANK.format(n) for n in (0, 1, 3)], "one_step_off", 4, "^ledger-2.bin was deleted"),
    ],
)
def test_a_deleted_ledger_is_not_taken_for_another_schedule_alone(
    found: list[str], mode: Mode, world: int, told: str
) -> None:
    """The file's absence has two causes, and the message names both where it can't know."""
    said = refusal(found, mode, world, done=4)
    assert said is not None
    assert re.search(told, said), said


def test_eleven_ranks_are_the_same_ranks_in_any_order() -> None:
    ranks = sorted(PER_RANK.format(rank) for rank in range(11))
    assert refusal(ranks, "one_step_off", 11, 4) is None
    assert (refusal(ranks, "one_step_off", 4, 4) or "").endswith("--nproc-per-node 11, not 4")
