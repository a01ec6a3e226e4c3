"""Named entries that any module may add to; their names are the choices of a flag."""

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A mapping from name to entry in the order of registration; `what` says in errors what the entries are."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._entries: dict[str, Entry] = {}
        self._aliases: dict[str, str] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raise ValueError for a name that is empty, has blanks around it, or is taken."""
        if not name or name != name.strip():
            raise ValueError(f"a {self.what} needs a name without blanks around it, got {name!r}")
        self._check_free(name)
        self._entries[name] = entry

    def add_alias(self, alias: str, name: str) -> None:
        """Let an entry be found by an earlier name too; it is not listed by it."""
        self._check_free(alias)
        self._aliases[alias] = name

    @property
    def aliases(self) -> tuple[str, ...]:
        """The earlier names."""
        return tuple(self._aliases)

    def _check_free(self, name: str) -> None:
        if name in self:
            raise ValueError(f"the {self.what} {name!r} is registered already: choose another name")

    def named(self, name: str) -> Entry:
        """Return the entry of this name. Raise ValueError with the known names if there is none."""
        if name not in self:
            known = ", ".join(self._entries)
            raise ValueError(
                f"unknown {self.what} {name!r}: use one of {known}, or import the module that registers it"
            )
        return self[name]

    def __getitem__(self, name: str) -> Entry:
        return self._entries[self._aliases.get(name, name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
