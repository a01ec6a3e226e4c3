"""Classes of one module instance: `module.__class__ = subclass(...)`, so that other instances stay as they are.

The subclass has the name of the stock class, and methods that a mixin puts before the stock ones. Its instances are
copied and pickled as those of a stock class are: the class is made again from the stock class and the mixins.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

_Link = tuple[type, tuple[tuple[str, Callable[..., Any]], ...]]
_MADE: dict[tuple[type, _Link], type[Any]] = {}


def subclass(kind: type[nn.Module], mixin: type, **functions: Callable[..., Any]) -> type[nn.Module]:
    """Return a class of the same name that has `mixin` before `kind`; `functions` become static methods of it.

    The same class for the same arguments. Functions of a module's top level can be pickled, and so can the instances.
    """
    return _subclass(kind, (mixin, tuple(sorted(functions.items()))))


def set_mixin(module: nn.Module, mixin: type, **functions: Callable[..., Any]) -> None:
    """Put a mixin before the class of this instance."""
    module.__class__ = subclass(type(module), mixin, **functions)


def remove_mixin(module: nn.Module, mixin: type) -> None:
    """Restore the class that the instance had before `set_mixin`; nothing where it has no such mixin.

    RuntimeError where its class was changed again since.
    """
    if not isinstance(module, mixin):
        return
    kind = type(module)
    if vars(kind).get("_made_of", (None, (None,)))[1][0] is not mixin:
        raise RuntimeError(f"the class of a {kind.__name__} was changed after {mixin.__name__}: undo that one first")
    module.__class__ = vars(kind)["_made_of"][0]


def stock_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of an instance without the mixins of `set_mixin`."""
    kind = type(module)
    while "_made_of" in vars(kind):
        kind = vars(kind)["_made_of"][0]
    return kind


def _subclass(kind: type[nn.Module], link: _Link) -> type[nn.Module]:
    if (kind, link) not in _MADE:
        mixin, functions = link
        members = {name: staticmethod(function) for name, function in functions}
        own = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
        _MADE[kind, link] = type(kind.__name__, (mixin, kind), {**members, **own, "_made_of": (kind, link)})
    return _MADE[kind, link]


def _reduce(self: Any, protocol: int) -> tuple[Any, ...]:
    """Return what makes the instance again: as pickle and deepcopy ask for it."""
    stored: tuple[Any, ...] = object.__reduce_ex__(self, max(protocol, 2))  # type: ignore[assignment]
    kind: type[Any] = type(self)
    links: list[_Link] = []
    while "_made_of" in vars(kind):
        kind, link = vars(kind)["_made_of"]
        links.insert(0, link)
    if not links:
        raise TypeError(f"another package made the class of this {kind.__name__} from an adapted one: copy it before")
    return (_new, (kind, *links), *stored[2:])  # what pickle stores beside the class


def _new(kind: Any, *links: _Link) -> Any:
    """Return an empty instance of the class that has these mixins."""
    for link in links:
        kind = _subclass(kind, link)
    return kind.__new__(kind)
