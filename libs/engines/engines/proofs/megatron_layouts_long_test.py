"""More layouts of four gloo ranks, held to what megatron_layouts_test holds the others to."""

from pathlib import Path

import pytest
import torch.distributed as dist

from engines.launch import ensure_group
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import HELD_LONG, RANKS, LayoutCase, Measured, measure, measure_all
from engines.proofs.megatron_layouts_test import OBJECTIVE
from engines.testing.same_runs import assert_same_bits, assert_same_run, assert_same_step

Runs = tuple[dict[str, Measured], list[list[Measured]]]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """FSDP2 in one process, by model; each rank's cases."""
    folder: Path = tmp_path_factory.mktemp("layouts")
    made = ensure_group("cpu")
    alone = {
        model: measure(LayoutCase(model), OBJECTIVE, folder / f"fsdp2 {model}", backend="fsdp2")
        for model in {case.model for case in HELD_LONG}
    }
    if made:
        dist.destroy_process_group()
    return alone, launch_forked(measure_all, (HELD_LONG, OBJECTIVE, folder), world_size=RANKS)


@pytest.mark.parametrize("number", range(len(HELD_LONG)), ids=[str(case) for case in HELD_LONG])
def test_every_layout_does_what_one_process_does(runs: Runs, number: int) -> None:
    alone, everyone = runs
    want = alone[HELD_LONG[number].model]
    for ranks in everyone:
        got = ranks[number]
        assert_same_run(want, got)
        assert_same_bits(want.exported, got.exported)
        assert got.same_bits
        assert len(got.resumed) == 3
    for step in everyone[0][number].resumed.values():
        assert_same_step(want.resumed["itself"], step)
