"""The choice of machines, held to a search over all of them."""

import itertools
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.common.launch.machines import RankDemand, training_machines
from rollout.workers.placement import Demand, NoCapacity

NODES = {"a": {"CPU": 4.0, "GPU": 2.0}, "b": {"CPU": 8.0}, "c": {"CPU": 8.0, "GPU": 4.0}}


def test_machines_with_the_devices_are_taken_the_commands_own_first() -> None:
    assert training_machines(RankDemand(1, 2, device="GPU"), None, None, NODES, "c") == ("c",)
    assert training_machines(RankDemand(2, 2, device="GPU"), None, None, NODES, "c") == ("c", "a")
    assert training_machines(RankDemand(3, 4), None, None, NODES, "b")[0] == "b"


def test_samplers_keep_the_machines_that_they_need() -> None:
    two = Demand(2, 1.0, 2.0)
    assert training_machines(RankDemand(1, 2, device="GPU"), two, None, NODES, "a") == ("a",)
    assert training_machines(RankDemand(1, 2, device="GPU"), two, 1, NODES, "c") == ("a",)


def test_what_the_cluster_does_not_have_is_refused_with_numbers() -> None:
    with pytest.raises(
        NoCapacity, match="3 machines of 2 ranks need 2 CPU and 2 GPU each, and 2 of the Ray cluster's 3"
    ):
        training_machines(RankDemand(3, 2, device="GPU"), None, None, NODES, "a")
    with pytest.raises(NoCapacity, match=r"1 machines of 9 ranks need 9 CPU each, and 0 .*4 CPU; 8 CPU; 8 CPU"):
        training_machines(RankDemand(1, 9), None, None, NODES, "a")
    with pytest.raises(NoCapacity, match="beside 4 ranks of 1 CPU and 1 GPU each, 2 samplers of 1 CPU and 2 GPU each"):
        training_machines(RankDemand(1, 4, device="GPU"), Demand(2, 1.0, 2.0), None, NODES, "a")
    with pytest.raises(NoCapacity, match="0 besides"):
        training_machines(RankDemand(3, 1), Demand(1), 1, NODES, "a")


def fits(demand: RankDemand, samplers: Demand, apart: int | None, nodes: Mapping[str, Mapping[str, float]]) -> bool:
    """Search all sets of training machines, and all numbers of samplers on each of the others."""
    for training in itertools.combinations(nodes, demand.machines):
        left = {name: node["CPU"] - demand.ranks * demand.cpus * (name in training) for name, node in nodes.items()}
        if min(left.values()) < 0:
            continue
        for places in itertools.combinations(nodes, len(nodes) if apart is None else apart):
            if apart is not None and set(places) & set(training):
                continue
            if sum(left[name] // samplers.cpus for name in places) >= samplers.workers:
                return True
    return False


@given(
    st.lists(st.integers(0, 6), min_size=1, max_size=4),
    *(st.integers(1, 3) for _ in range(4)),
    st.sampled_from([None, 1, 2]),
)
def test_machines_are_found_where_there_are_any(
    sizes: list[int], machines: int, ranks: int, workers: int, cpus: int, apart: int | None
) -> None:
    nodes = {str(i): {"CPU": float(size)} for i, size in enumerate(sizes)}
    demand, samplers = RankDemand(machines, ranks), Demand(workers, float(cpus))
    if apart is not None and apart > workers:
        return
    try:
        found = training_machines(demand, samplers, apart, nodes, "0")
    except NoCapacity:
        assert not fits(demand, samplers, apart, nodes)
        return
    assert fits(demand, samplers, apart, {name: nodes[name] for name in nodes})
    assert len(set(found)) == machines
    assert all(nodes[name]["CPU"] >= ranks for name in found)
