"""Objects of the caller that no module has under their own name, such as a lambda: they are found here by a name.

Only this process has them.
"""

from typing import Any

_GIVEN: dict[str, Any] = {}


def give(name: str, value: Any) -> str:
    """Keep an object and return the spec `package.module:name` by which this process loads it."""
    unique, number = name, 2
    while _GIVEN.get(unique, value) is not value:
        unique, number = f"{name}_{number}", number + 1
    _GIVEN[unique] = value
    return f"{__name__}:{unique}"


def is_given(spec: str) -> bool:
    """Return whether a spec names one of these objects."""
    return spec.startswith(f"{__name__}:")


def __getattr__(name: str) -> Any:
    if name not in _GIVEN:
        raise AttributeError(f"nothing was given as {name!r} in this process")
    return _GIVEN[name]
