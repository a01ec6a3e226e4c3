"""Adaptations: applied whole or not at all, once, for their versions, and undone."""

from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.devices.adaptations import Adaptation, Patch, applied, apply


def target() -> SimpleNamespace:
    return SimpleNamespace(__name__="target", a=1, b=2)


def of(owner: Any, *names: str, **changes: Any) -> Adaptation:
    patches = [Patch(owner, name, f"new {name}") for name in names]
    return replace(Adaptation("test", "packaging", ">=20", lambda: patches), **changes)


def test_applied_twice_and_undone_twice() -> None:
    owner = target()
    first = apply(of(owner, "a", "b"))
    assert first.changed == ("target.a", "target.b")
    assert apply(of(owner, "a", "b")) is first
    assert (owner.a, owner.b) == ("new a", "new b")
    first.undo()
    first.undo()
    assert (owner.a, owner.b) == (1, 2)
    apply(of(owner, "a")).undo()
    assert owner.a == 1


def test_applied_for_a_while_and_inside_of_that() -> None:
    owner = target()
    with applied(of(owner, "a")):
        with applied(of(owner, "a")):
            assert owner.a == "new a"
        assert owner.a == "new a"
    assert owner.a == 1
    with pytest.raises(KeyError), applied(of(owner, "a")):
        raise KeyError
    assert owner.a == 1


@given(st.permutations(["a", "b", "c", "d"]))
def test_a_failed_patch_changes_nothing(names: list[str]) -> None:
    """Whichever comes first, what is there stays as it was."""
    owner = target()
    first = next(name for name in names if name in "cd")
    with pytest.raises(
        ValueError, match=f"adaptation test failed, nothing was changed: packaging .* no target.{first}"
    ):
        apply(of(owner, *names))
    assert vars(owner) == vars(target())


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"versions": "<20"}, rf"written for packaging <20, and {version('packaging')} is installed"),
        ({"package": "no-such-package"}, "no-such-package is not installed"),
        ({"unverified": "no hardware"}, r"is unverified \(no hardware\)"),
        ({"check": lambda: "parallel groups exist"}, "cannot be applied now: parallel groups exist"),
    ],
)
def test_refused(changes: dict[str, Any], text: str) -> None:
    owner = target()
    with pytest.raises(ValueError, match=text):
        apply(of(owner, "a", **changes))
    assert owner.a == 1


def test_unverified_can_be_accepted() -> None:
    owner = target()
    changed = apply(of(owner, "a", unverified="no hardware"), accept_unverified=True)
    assert owner.a == "new a"
    changed.undo()


def test_what_was_replaced_again_is_not_undone() -> None:
    owner = target()
    changed = apply(of(owner, "a", "b"))
    ours, owner.b = owner.b, "theirs"
    with pytest.raises(RuntimeError, match=r"target\.b was replaced after test: undo that one first"):
        changed.undo()
    assert owner.a == "new a"
    owner.b = ours
    changed.undo()
    assert (owner.a, owner.b) == (1, 2)
