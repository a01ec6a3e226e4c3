"""A target sees the packages that it declares and no others: from inside seqpack, `import ray` fails."""

import importlib.util

import pytest

import seqpack


def test_seqpack_is_here() -> None:
    """The library under test, with the torch that it declares."""
    assert importlib.util.find_spec("torch")
    assert "pack" in dir(seqpack)


def test_ray_is_locked_but_not_declared() -> None:
    """It lies in the same hub (declared_test imports it), and is out of sight here."""
    with pytest.raises(ModuleNotFoundError, match="ray"):
        import ray  # noqa: F401


def test_siblings_are_out_of_sight() -> None:
    """What seqpack does not depend on is not importable from its target."""
    for name in [
        "dyncp",
        "engines",
        "rollout",
        "objectives",
        "chat_tools",
        "runlog",
        "runplan",
        "schedules",
        "transformers",
    ]:
        assert importlib.util.find_spec(name) is None, name
