import pytest

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
    with pytest.raises(ValueError, match=r"^unknown shape 'long': use one of round, flat, or import the module"):
        registry.named("long")
    with pytest.raises(ValueError, match=r"^the shape 'round' is registered already"):
        registry.add("round", 3)
    for name in ("", " x", "x "):
        with pytest.raises(ValueError, match=r"^a shape needs a name"):
            registry.add(name, 3)
    assert dict(registry) == {"round": 1, "flat": 2}
