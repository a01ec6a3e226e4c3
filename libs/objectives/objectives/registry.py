"""Named entries that any module may add to; their names are the choices of a flag."""

from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from seqpack.extensions.load_object import is_user_code, load_object

Entry = TypeVar("Entry")


class Registry(Mapping[str, Entry], Generic[Entry]):
    """A mapping from name to entry in the order of registration; `what` says in errors what the entries are.

    `module` registers the entries called `names`: they are listed at once, and the module is imported for the first of
    them that is asked for.

    `FILE.py:NAME` and `package.module:NAME` are names too, of a user's code with `kind` as its flag: what it registers,
    or what the module's `entry_of(spec, object)` makes of an undecorated function.
    """

    def __init__(self, what: str, module: str = "", names: Iterable[str] = (), kind: str = "") -> None:
        self.what, self.kind = what, kind or what
        self._module = module
        self._of_users: dict[str, Entry] = {}
        self._entries: dict[str, Entry | None] = dict.fromkeys(names)
        self._aliases: dict[str, str] = {}

    def add(self, name: str, entry: Entry) -> None:
        """Add an entry. Raise ValueError for a name that is empty, has blanks around it or a colon, or is taken."""
        if not name or name != name.strip() or is_user_code(name):
            raise ValueError(f"a {self.what} needs a name without blanks around it and without a colon, got {name!r}")
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
        """Raise ValueError with the known names unless this is one of them, or of user code that can't be loaded."""
        if is_user_code(name):
            self._of_user(name)
        elif name not in self:
            known = ", ".join(self._entries)
            raise ValueError(
                f"unknown {self.what} {name!r}: use one of {known}, or FILE.py:NAME, or import the module that "
                "registers it"
            )

    def listed_name(self, name: str) -> str:
        """Return the name that an entry is listed by."""
        return self._aliases.get(name, name)

    def _of_user(self, spec: str) -> Entry:
        """Return the entry of a user's code; ValueError where there is none."""
        if spec not in self._of_users:
            if not self._module:
                raise ValueError(f"{self.what} {spec!r}: register it under a name, no file can be given here")
            named, module = load_object(spec, self.kind), import_module(self._module)
            listed: list[Any] = [entry for entry in self._entries.values() if entry is not None]
            registered = [entry for entry in listed if getattr(entry, "function", None) is named]
            self._of_users[spec] = registered[0] if registered else module.entry_of(spec, named)
        return self._of_users[spec]

    def __contains__(self, name: object) -> bool:
        if isinstance(name, str) and is_user_code(name):
            try:
                return self._of_user(name) is not None
            except ValueError:
                return False
        return name in self._entries or name in self._aliases

    def __getitem__(self, name: str) -> Entry:
        if is_user_code(name):
            return self._of_user(name)
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
