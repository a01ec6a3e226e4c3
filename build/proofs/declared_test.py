"""The other half of undeclared_test: a target that declares ray imports it."""

import ray


def test_ray_is_importable() -> None:
    """The version that the lock names."""
    assert ray.__version__ == "2.60.0"
