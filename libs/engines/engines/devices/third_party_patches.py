"""Packages that patch others by a function of their own, brought under `engines.devices.adaptations`.

`changes_made_by` lets such a function run once, notes what it replaced, and puts everything back: what is left is a
list of patches, to be applied and undone like any other.
"""

from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

from engines.devices.adaptations import Patch

_ABSENT = object()


def changes_made_by(patcher: Callable[[], object], modules: Iterable[ModuleType]) -> list[Patch]:
    """Return what `patcher` replaces in these modules and the classes that they define; all of it is put back.

    ValueError, with everything restored, where it adds a name, which no patch can undo. The patcher's own errors pass
    on.
    """
    owners = _owners(modules)
    before = [dict(vars(owner)) for owner in owners]
    try:
        patcher()
    finally:
        changes = [_restore(owner, names) for owner, names in zip(owners, before, strict=True)]
    added = [f"{owner.__name__}.{name}" for owner, (_, names) in zip(owners, changes, strict=True) for name in names]
    if added:
        raise ValueError(f"names that were not there cannot be undone: {', '.join(added)}")
    return [patch for patches, _ in changes for patch in patches]


def _owners(modules: Iterable[ModuleType]) -> list[Any]:
    """Return the modules, and the classes that each of them defines."""
    owners: list[Any] = []
    for module in modules:
        classes = (value for value in vars(module).values() if isinstance(value, type))
        owners += [module, *(kind for kind in dict.fromkeys(classes) if kind.__module__ == module.__name__)]
    return owners


def _restore(owner: Any, before: dict[str, Any]) -> tuple[list[Patch], list[str]]:
    """Restore an owner, and return (patches for what was replaced, names that were added)."""
    changed, added = [], []
    for name, value in list(vars(owner).items()):
        old = before.get(name, _ABSENT)
        if old is _ABSENT:
            delattr(owner, name)
            if not name.startswith("__"):
                added.append(name)
        elif old is not value:
            setattr(owner, name, old)
            changed.append(Patch(owner, name, value))
    return changed, added
