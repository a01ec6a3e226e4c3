"""Seconds of a weight sync: public figures within 30 %, and what follows from bytes and links alone."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rollout.sync import Box, Shard, plan_sync
from rollout.sync.manifest import TensorSpec
from runplan.estimates.sync_time import NIC, SHARE, Phase, sync_seconds


def nemo_rl(parameters: float, bulk: float, ranks: int, parts: int) -> list[Phase]:
    """Shards of the bulk, then the rest: gathered by the trainer, broadcast to the samplers."""
    nbytes = 2 * parameters
    rest = nbytes * (1 - bulk)
    return [Phase.of_shards(nbytes * bulk, ranks, ranks, parts), *[Phase(rest, rest)] * 2]


def miles(parameters: float, ranks: int, stages: int, parts: int) -> list[Phase]:
    """Each rank gathers its stage, of which its targets, as many as ranks in all, then get their part."""
    stage = 2 * parameters / stages
    senders = ranks // stages
    writes = Phase.of_shards(stage, senders, ranks, parts)
    return [Phase.of_gather(stage, senders), Phase(writes.sent, stages * writes.taken)]


PUBLIC = {
    "NeMo-RL 397B": (nemo_rl(397e9, 0.974, 256, 16), 1.97, 2.17),
    "NeMo-RL 671B": (nemo_rl(671e9, 0.976, 256, 32), 2.39, 2.83),
    "miles 235B": (miles(235e9, 64, 4, 32), 3.162, 3.162),
}


@pytest.mark.parametrize("figure", PUBLIC)
def test_public_figures_are_predicted_within_30_percent(figure: str) -> None:
    phases, low, high = PUBLIC[figure]
    predicted = sync_seconds(phases, NIC)
    print(figure, predicted)
    for measured in (low, high):
        assert predicted == pytest.approx(measured, rel=0.3)


def test_those_that_the_text_names_as_far_are() -> None:
    assert 2.637 / sync_seconds(miles(106e9, 32, 4, 8), NIC) == pytest.approx(1.6, abs=0.05)
    assert 8.480 / sync_seconds(miles(744e9, 128, 8, 64), NIC) == pytest.approx(1.9, abs=0.05)
    assert 0.74 / sync_seconds(nemo_rl(30.5e9, 0.95, 16, 8), NIC) > 2


MEASURED = {
    "2 machines, a sampler each": (37.5, 37.5, {12: 30.26, 25: 14.93, 50: 8.24}),
    "4 machines, 1 sampler": (18.75, 56.25, {50: 9.95, 100: 5.34}),
}
"""docs/benchmarks/weight_sync_nodes.json: MB sent, MB taken, and seconds by Mbit/s."""


@pytest.mark.parametrize("setup", MEASURED)
def test_our_own_transport_is_predicted_within_20_percent(setup: str) -> None:
    """At the two lowest rates; at higher ones the two processors of all machines count too."""
    sent, taken, rows = MEASURED[setup]
    for number, (rate, seconds) in enumerate(rows.items()):
        predicted = sync_seconds([Phase(1e6 * sent, 1e6 * taken)], rate * 1e6 / 8)
        assert seconds > 0.8 * predicted
        assert number >= 2 or seconds < 1.2 * predicted


sizes = st.floats(1, 1e13)


@given(sizes, sizes, st.floats(1, 1e12), st.floats(1, 1e12))
def test_the_slower_of_the_two_ways_counts(sent: float, taken: float, out: float, into: float) -> None:
    seconds = sync_seconds([Phase(sent, taken)], out, into)
    assert SHARE * seconds == pytest.approx(max(sent / out, taken / into))
    assert sync_seconds([Phase(sent, taken)] * 3, out, into) == pytest.approx(3 * seconds)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_even_shards_are_what_the_plan_sends(senders: int, copies: int, parts: int) -> None:
    """Of one matrix whose rows both sides split evenly: the planner's own bytes."""
    rows = senders * parts * copies
    spec = TensorSpec("w", (rows * parts, 1), torch.uint8)
    each = spec.shape[0] // senders
    held = [Shard(rank, "w", Box((rank * each, 0), (each, 1))) for rank in range(senders)]
    run = spec.shape[0] // parts
    wanted = [
        Shard(senders + copy * parts + part, "w", Box((part * run, 0), (run, 1)))
        for copy in range(copies)
        for part in range(parts)
    ]
    plan = plan_sync([spec], held, wanted, 1 << 20)
    planned = Phase.of_plan(plan.bytes_of(process) for process in range(senders + copies * parts))
    expected = Phase.of_shards(spec.shape[0], senders, copies * parts, parts)
    assert planned.taken == expected.taken
    assert planned.sent == pytest.approx(expected.sent, abs=16 * copies * parts)


def test_a_link_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 0 bytes a second"):
        sync_seconds([], 0)
