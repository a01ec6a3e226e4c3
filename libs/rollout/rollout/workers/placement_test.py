"""What a cluster can hold: the count of places is that of trying every layout."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.workers.placement import Demand, nodes_apart, refusal, room

SMALL = st.integers(0, 3).map(float)
NODES = st.lists(st.fixed_dictionaries({"CPU": SMALL, "GPU": SMALL, "NPU": SMALL}), max_size=3)


def fits(demand: Demand, nodes: list[dict[str, float]], layout: Sequence[int]) -> bool:
    """Whether layout[i] workers on each node i take no more than it has."""
    needs = {"CPU": demand.cpus, "GPU": demand.gpus, **demand.resources}
    return all(
        count * need <= node.get(name, 0)
        for node, count in zip(nodes, layout, strict=True)
        for name, need in needs.items()
    )


@settings(max_examples=200, deadline=None)
@given(NODES, st.integers(1, 5), st.integers(0, 2), st.integers(0, 2), st.integers(1, 2))
def test_what_is_refused_has_no_layout_and_what_is_not_has_one(
    nodes: list[dict[str, float]], workers: int, cpus: int, gpus: int, npus: int
) -> None:
    demand = Demand(workers, cpus=cpus, gpus=gpus, resources={"NPU": npus})
    layouts = itertools.product(range(workers + 1), repeat=len(nodes))
    possible = any(sum(layout) == workers and fits(demand, nodes, layout) for layout in layouts)
    assert (refusal(demand, nodes) is None) == possible


def test_a_part_of_a_resource_fits_as_often_as_its_share_says() -> None:
    assert room(Demand(cpus=0.1), [{"CPU": 1.0}]) == 10
    assert room(Demand(cpus=0.3), [{"CPU": 1.0}, {"CPU": 0.5}]) == 4


def test_a_worker_over_two_nodes_has_half_of_its_resources_on_each() -> None:
    demand = Demand(2, cpus=2, gpus=4, nodes=2)
    assert (demand.bundle, demand.parts) == ({"CPU": 1.0, "GPU": 2.0}, 4)
    assert refusal(demand, [{"CPU": 2.0, "GPU": 4.0}] * 2) is None
    why = refusal(demand, [{"CPU": 2.0, "GPU": 2.0}] * 2)
    assert why is not None
    assert "4 parts of 2 samplers of 1 CPU and 2 GPU each find 2 places on 2 nodes" in why


def test_nodes_apart_are_those_with_the_most_room_and_never_the_own() -> None:
    nodes = {"a": {"CPU": 9.0}, "b": {"CPU": 1.0}, "c": {"CPU": 4.0}, "d": {"CPU": 2.0}}
    assert nodes_apart(Demand(3), nodes, {"a"}, 1) == ("c",)
    assert set(nodes_apart(Demand(6), nodes, {"a"}, 2)) == {"c", "d"}
    with pytest.raises(ValueError, match="7 samplers of 1 CPU each find 6 places on 2 nodes"):
        nodes_apart(Demand(7), nodes, {"a"}, 2)
    with pytest.raises(ValueError, match="a pool of 4 nodes apart from training's: the cluster has 3"):
        nodes_apart(Demand(7), nodes, {"a"}, 4)
    with pytest.raises(ValueError, match="1 samplers can't fill 2 nodes"):
        nodes_apart(Demand(1), nodes, {"a"}, 2)


def test_the_refusal_has_the_numbers() -> None:
    why = refusal(Demand(4, cpus=2, gpus=1), [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 1.0, "GPU": 4.0}])
    assert why is not None
    assert "4 samplers of 2 CPU and 1 GPU each find 2 places on 2 nodes" in why
    assert "8 CPU, 2 GPU on node 0; 1 CPU, 4 GPU on node 1" in why


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"workers": 0}, "at least 1"),
        ({"workers": True}, "at least 1"),
        ({"cpus": -1}, "at least 0"),
        ({"cpus": 0}, "needs something"),
        ({"resources": {"GPU": 1}}, "say gpus"),
        ({"resources": {"far": float("inf")}}, "finite"),
    ],
)
def test_a_demand_is_checked_when_it_is_made(wrong: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Demand(**wrong)
