"""Earlier names of public arguments and attributes: callers that use them go on working."""

import functools
from collections.abc import Callable
from operator import attrgetter
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that also takes keyword arguments by their earlier names: `old="new"`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            options: dict[str, Any] = dict(kwargs)
            for old in names.keys() & options.keys():
                if names[old] in options:
                    raise TypeError(f"{old} is the earlier name of {names[old]}: give one of them")
                options[names[old]] = options.pop(old)
            return function(*args, **options)

        return call

    return decorate


def renamed(name: str) -> Any:
    """Return a property that is the attribute or method `name`: `old = renamed("new")` in the body of a class."""
    return property(attrgetter(name))
