"""The imports of a user's file work under `bazel run`, with what `apps.common.plugins` brings along."""

import importlib

import pytest

from apps.common import plugins

ROLLOUT = importlib.import_module("rollout")  # by name, so that this test brings nothing along itself
MODULES = ("rollout.environments.moves", "rollout.environments.blocking")


@pytest.mark.parametrize("name", sorted(ROLLOUT._EXPORTS))
def test_a_name_of_the_facade(name: str) -> None:
    assert plugins.__name__ == "apps.common.plugins"
    assert getattr(ROLLOUT, name) is not None


@pytest.mark.parametrize("name", MODULES)
def test_a_module_that_the_pages_name(name: str) -> None:
    importlib.import_module(name)
