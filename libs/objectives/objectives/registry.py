"""Named entries that any module may add to; their names are the choices of a flag."""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A mapping from name to entry in the order of registration; `what` says in errors what the entries are.

    `module` registers the entries called `names`: they are listed at once, and the module is imported for the first of
    them that is asked for.
    """

    def __init__(self, what: str, module: str = "", names: Iterable[str] = ()) -> None:
        self.what = what
        self._module = module
        self._entries: dict[str, Entry | None] = dict.fromkeys(names)
        self._aliases: dict[str, str] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raise ValueError for a name that is empty, has blanks around it, or is taken."""
        if not name or name != name.strip():
            raise ValueError(f"a {self.what} needs a name without blanks around it, got {name!r}")
        if name not in self._entries or self._entries[name] is not None:
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
        self.check_known(name)
        return self[name]

    def check_known(self, name: str) -> None:
        """Raise ValueError with the known names unless this is one of them."""
        if name not in self:
            known = ", ".join(self._entries)
            raise ValueError(
                f"unknown {self.what} {name!r}: use one of {known}, or import the module that registers it"
            )

    def listed_name(self, name: str) -> str:
        """Return the name that an entry is listed by."""
        return self._aliases.get(name, name)

    def __contains__(self, name: object) -> bool:
        return name in self._entries or name in self._aliases

    def __getitem__(self, name: str) -> Entry:
        entry = self._entries[self.listed_name(name)]
        if entry is None:
            import_module(self._module)
            entry = self._entries[self.listed_name(name)]
        assert entry is not None
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
