"""A process knows its place among the machines of an engine by one variable."""

import pytest

from rollout.node_place import NodePlace, node_place, place_of

PLACE = NodePlace(1, 2, "127.0.0.1", "10.0.0.7", 29500)


def test_a_variable_carries_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    assert node_place({}) is None
    assert node_place(PLACE.variables) == PLACE
    for name, value in PLACE.variables.items():
        monkeypatch.setenv(name, value)
    assert place_of(2) == PLACE
    with pytest.raises(ValueError, match=r"an engine over 1 machines .nodes., and this process is one of 2"):
        place_of(1)


def test_an_engine_over_machines_is_not_started_on_one_alone() -> None:
    assert place_of(1) is None
    with pytest.raises(ValueError, match=r"over 2 machines .nodes., and this process is one of 1"):
        place_of(2)


def test_an_address_has_its_interface() -> None:
    assert PLACE.interface == "lo"
    assert NodePlace(0, 2, "192.0.2.1", "192.0.2.1", 1).interface is None
