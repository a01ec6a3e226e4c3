"""Arrows point down only: what each library depends on, as `bazel query` sees it."""

import os
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PAIRS = (pair.split(":") for pair in os.environ["ARROWS"].split(";"))
ARROWS = {name: set(filter(None, allowed.split(","))) for name, allowed in PAIRS}


@pytest.mark.parametrize("library", sorted(ARROWS))
def test_depends_only_downwards(library: str) -> None:
    """Every rule in the closure belongs to the library itself or to one that it may see."""
    labels = (HERE / f"deps_of_{library}").read_text().split()
    assert f"//libs/{library}:{library}" in labels
    seen = {label.removeprefix("//").split(":")[0] for label in labels}
    allowed = {f"libs/{name}" for name in ARROWS[library] | {library}}
    assert seen <= allowed, f"{library} may depend on {sorted(allowed)}, and depends on {sorted(seen - allowed)}"


def test_arrows_are_those_of_the_design() -> None:
    """The table itself has no cycle, and runlog stands alone."""
    assert all(name not in ARROWS[below] for name in ARROWS for below in ARROWS[name])
    assert ARROWS["runlog"] == set()
    assert all("runlog" not in allowed for allowed in ARROWS.values())
    assert "rollout" not in ARROWS["engines"]
    assert "engines" not in ARROWS["rollout"]
    assert "engines" not in ARROWS["schedules"]
