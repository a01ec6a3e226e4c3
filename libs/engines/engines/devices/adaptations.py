"""Adaptations of other packages: explicit, reversible, for the versions that they were written for.

1. An `Adaptation` names its package, the versions and the attributes that it replaces. Outside of these versions it is
   refused, and where an attribute is not there, nothing is changed and the error says which.
2. `apply` returns what it changed; `undo()` puts it back. Applied twice, the second call changes nothing.
3. What nobody has verified says so, and is refused unless the caller accepts it by name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from packaging.specifiers import SpecifierSet


@dataclass(frozen=True)
class Patch:
    """An attribute of a module, a class or an object, and what takes its place."""

    owner: Any
    name: str
    value: Any

    @property
    def path(self) -> str:
        """Its dotted name."""
        return f"{getattr(self.owner, '__name__', type(self.owner).__name__)}.{self.name}"


@dataclass(frozen=True)
class Adaptation:
    """Changes to one package."""

    name: str
    package: str
    versions: str
    """Versions that it was written for, such as ">=2.13,<2.14"."""
    patches: Callable[[], Sequence[Patch]]
    """Function that makes the patches when it is applied; it imports the package."""
    check: Callable[[], str | None] = lambda: None
    """Function that returns why it is too late, or too early, to apply it; None where it is not."""
    unverified: str | None = None
    """Reason why it is unverified; None where a test ran it."""


@dataclass
class Applied:
    """The changes of an adaptation. `undo()` restores what was there; a second call does nothing."""

    adaptation: Adaptation
    changed: tuple[str, ...]
    """Dotted names of what was replaced."""
    _before: list[tuple[Patch, Any]]
    _held: dict[str, "Applied"]

    def undo(self) -> None:
        """Restore what was there. RuntimeError, with nothing restored, where somebody has replaced it since."""
        for patch, _ in self._before:
            if getattr(patch.owner, patch.name) is not patch.value:
                raise RuntimeError(f"{patch.path} was replaced after {self.adaptation.name}: undo that one first")
        for patch, before in reversed(self._before):
            setattr(patch.owner, patch.name, before)
        self._before.clear()
        self._held.pop(self.adaptation.name, None)

    @contextmanager
    def without(self) -> Iterator[None]:
        """Restore what was there inside the block, and what was changed behind it."""
        before = [*self._before]
        self.undo()
        try:
            yield
        finally:
            for patch, _ in before:
                setattr(patch.owner, patch.name, patch.value)
            self._before.extend(before)
            self._held[self.adaptation.name] = self


_applied: dict[str, Applied] = {}


def apply(
    adaptation: Adaptation,
    accept_unverified: bool = False,
    installed: str | None = None,
    held: dict[str, Applied] | None = None,
) -> Applied:
    """Apply an adaptation, or return the changes of its first application.

    `installed`: the version of the package, where metadata do not tell. `held`: what was applied, by name, to the one
    object that the adaptation changes; by default to this process. ValueError, with nothing changed: the package is not
    installed, of another version, or lacks an attribute; the adaptation is unverified and not accepted; or it comes at
    the wrong time.
    """
    held = _applied if held is None else held
    if (before := held.get(adaptation.name)) is not None:
        return before
    title = f"adaptation {adaptation.name}"
    if adaptation.unverified is not None and not accept_unverified:
        raise ValueError(f"{title} is unverified ({adaptation.unverified}): accept it by accept_unverified=True")
    installed = installed or _version(adaptation)
    if not SpecifierSet(adaptation.versions).contains(installed, prereleases=True):
        raise ValueError(
            f"{title} was written for {adaptation.package} {adaptation.versions}, and {installed} is installed: "
            "install one of these versions"
        )
    if reason := adaptation.check():
        raise ValueError(f"{title} cannot be applied now: {reason}")
    patches = list(adaptation.patches())
    missing = [patch.path for patch in patches if not hasattr(patch.owner, patch.name)]
    if missing:
        raise ValueError(f"{title} failed, nothing was changed: {adaptation.package} {installed} has no {missing[0]}")
    changed = Applied(adaptation, tuple(patch.path for patch in patches), [], held)
    for patch in patches:
        changed._before.append((patch, getattr(patch.owner, patch.name)))
        setattr(patch.owner, patch.name, patch.value)
    held[adaptation.name] = changed
    return changed


@contextmanager
def applied(adaptation: Adaptation) -> Iterator[None]:
    """Apply an adaptation inside the block; where it is applied already, change nothing and leave it applied."""
    inside = adaptation.name in _applied
    changed = apply(adaptation)
    try:
        yield
    finally:
        if not inside:
            changed.undo()


def _version(adaptation: Adaptation) -> str:
    try:
        return _version_of(adaptation.package)
    except PackageNotFoundError:
        raise ValueError(f"adaptation {adaptation.name}: {adaptation.package} is not installed") from None


@cache
def _version_of(package: str) -> str:
    return version(package)
