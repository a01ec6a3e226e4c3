"""Fields of nested configurations by dotted path."""

from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar

C = TypeVar("C")


def value_at(config: Any, path: str) -> Any:
    """Return the value of a field by its dotted path."""
    for part in path.split("."):
        config = getattr(config, part)
    return config


def with_values(config: C, values: dict[str, Any]) -> C:
    """Return the configuration with the fields of these dotted paths replaced, all at once."""
    here: dict[str, Any] = {}
    for item in fields(config):  # type: ignore[arg-type]
        name, value = item.name, getattr(config, item.name)
        below = {path[len(name) + 1 :]: new for path, new in values.items() if path.startswith(f"{name}.")}
        if name in values:
            here[name] = values[name]
        elif below and is_dataclass(value):
            here[name] = with_values(value, below)
    return replace(config, **here)  # type: ignore[type-var]
