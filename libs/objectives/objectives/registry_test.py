import pytest

from objectives import advantages, losses
from objectives.choices import ESTIMATORS, GROUP_SIZES, LOSS_OPTIONS, POLICY_LOSSES, check_group_size
from objectives.registry import Registry


def test_a_registry_keeps_order_and_names() -> None:
    registry: Registry[int] = Registry("shape")
    registry.add("round", 1)
    registry.add("flat", 2)
    assert list(registry) == ["round", "flat"]
    assert len(registry) == 2
    assert dict(registry) == {"round": 1, "flat": 2}
    assert registry.named("flat") == 2
    with pytest.raises(KeyError):
        registry["long"]


def test_an_earlier_name_finds_its_entry_and_is_not_listed() -> None:
    registry: Registry[int] = Registry("shape")
    registry.add("round", 1)
    registry.add_alias("circular", "round")
    assert registry["circular"] == registry.named("circular") == 1
    assert "circular" in registry
    assert (list(registry), registry.aliases) == (["round"], ("circular",))
    with pytest.raises(ValueError, match="'circular' is registered already"):
        registry.add("circular", 2)
    for taken in ("round", "circular"):
        with pytest.raises(ValueError, match=f"{taken!r} is registered already"):
            registry.add_alias(taken, "round")


def test_refusals() -> None:
    registry: Registry[int] = Registry("shape")
    registry.add("round", 1)
    registry.add("flat", 2)
    with pytest.raises(ValueError, match=r"^unknown shape 'long': use one of round, flat, or FILE.py:NAME, or import "):
        registry.named("long")
    with pytest.raises(ValueError, match=r"^the shape 'round' is registered already"):
        registry.add("round", 3)
    for name in ("", " x", "x ", "a:b"):
        with pytest.raises(ValueError, match=r"^a shape needs a name"):
            registry.add(name, 3)
    assert dict(registry) == {"round": 1, "flat": 2}


def test_names_that_are_known_before_their_module_is_imported_are_its_entries() -> None:
    assert losses.POLICY_LOSSES is POLICY_LOSSES
    assert advantages.ESTIMATORS is ESTIMATORS
    assert {name: tuple(POLICY_LOSSES.named(name).defaults) for name in LOSS_OPTIONS} == LOSS_OPTIONS
    assert {name: ESTIMATORS.named(name).min_group_size for name in GROUP_SIZES} == GROUP_SIZES


def test_an_entry_that_its_module_registers_is_made_when_it_is_asked_for() -> None:
    registry: Registry[int] = Registry("number", "decimal", ["one"])
    assert list(registry) == ["one"]
    with pytest.raises(AssertionError):  # the module does not register it
        registry.named("one")
    registry.add("one", 1)
    assert registry.named("one") == 1
    with pytest.raises(ValueError, match="registered already"):
        registry.add("one", 2)


def test_a_group_size_of_an_unknown_advantage_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown advantage 'gae'"):
        check_group_size("gae", 8)
