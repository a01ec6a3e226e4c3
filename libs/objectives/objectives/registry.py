"""Named entries that any module may add to; their names are the choices of a flag."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A mapping from name to entry in the order of registration; `what` says in errors what the entries are."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, Entry] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raise ValueError for a name that is empty, has blanks around it, or is taken."""
        if not name or name != name.strip():
            raise ValueError(f"a {self.what} needs a name without blanks around it, got {name!r}")
        if name in self._entries:
            raise ValueError(f"the {self.what} {name!r} is registered already: choose another name")
        self._entries[name] = entry

    def named(self, name: str) -> Entry:
        """Return the entry of this name. Raise ValueError with the known names otherwise."""
        if name not in self._entries:
            known = ", ".join(self._entries)
            raise ValueError(
                f"unknown {self.what} {name!r}: use one of {known}, or import the module that registers it"
            )
        return self._entries[name]

    def __getitem__(self, name: str) -> Entry:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
