"""Hybrid sharding on gloo processes: the cases that hybrid_test leaves out."""

from typing import Any

import pytest

from engines.fsdp2.hybrid_test import LONG, assert_same_run, assert_shares, run
from engines.proofs.forked_ranks import launch_forked

Runs = dict[str, tuple[Any, ...]]


def run_all(shards: int | None) -> Runs:
    return {name: run(name, shards) for name in LONG}


@pytest.fixture(scope="module")
def runs() -> tuple[Runs, Runs]:
    return launch_forked(run_all, (None,)), launch_forked(run_all, (2,), 4)


@pytest.mark.parametrize("name", LONG)
def test_copies_of_shards_give_the_steps_of_one_process(runs: tuple[Runs, Runs], name: str) -> None:
    alone, together = (some[name] for some in runs)
    assert_same_run(name, alone, together)
    assert_shares(alone, together)
