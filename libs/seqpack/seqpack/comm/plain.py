"""Plain data as bytes, exact and with its types: JSON in which each container but a list says what it is.

A receiver makes nothing but plain values, paths and the dataclasses that it names, each by its own constructor: what
arrives runs no code of the sender's choice, as a pickle would.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any


def encode_plain(value: Any) -> bytes:
    """Return the bytes of a value: None, booleans, numbers, text, bytes, paths, dataclasses, and lists, tuples, sets
    and dictionaries of such.

    Raises:
        ValueError: it holds anything else; the text names the type.
    """
    return json.dumps(_plain(value), separators=(",", ":")).encode()


def decode_plain(data: bytes, kinds: Sequence[type] = ()) -> Any:
    """Return the value that `encode_plain` wrote, tuples as tuples. `kinds`: the dataclasses that it may hold.

    Raises:
        ValueError: it holds another one.
    """
    return _read(json.loads(data), {kind.__name__: kind for kind in kinds})


def dataclasses_in(value: Any) -> tuple[type, ...]:
    """Return the types of the dataclasses in a plain value: what `decode_plain` is to expect of another like it."""
    if isinstance(value, Mapping):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return tuple(dict.fromkeys(kind for one in value for kind in dataclasses_in(one)))
    if not is_dataclass(value) or isinstance(value, type):
        return ()
    held = [getattr(value, field.name) for field in fields(value) if field.init]
    return tuple(dict.fromkeys([type(value), *dataclasses_in(held)]))


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int | float):  # numpy's float64 is one too
        return float(value) if isinstance(value, float) else int(value)
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if hasattr(value, "_asdict"):
        return {type(value).__name__: {name: _plain(one) for name, one in value._asdict().items()}}
    if isinstance(value, tuple | set | frozenset):
        kind = "tuple" if isinstance(value, tuple) else "set" if isinstance(value, set) else "frozenset"
        return {kind: [_plain(one) for one in value]}
    if isinstance(value, Mapping):
        return {"dict": [[_plain(key), _plain(one)] for key, one in value.items()]}
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if isinstance(value, Path):
        return {"path": str(value)}
    if is_dataclass(value) and not isinstance(value, type):
        made = {field.name: _plain(getattr(value, field.name)) for field in fields(value) if field.init}
        return {type(value).__name__: made}
    raise ValueError(f"a {type(value).__name__} is no plain value: ranks exchange JSON, paths and dataclasses")


def _read(value: Any, kinds: Mapping[str, type]) -> Any:
    if isinstance(value, list):
        return [_read(one, kinds) for one in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind in _CONTAINERS:
        return _CONTAINERS[kind](_read(one, kinds) for one in held)
    if kind == "dict":
        return {_read(key, kinds): _read(one, kinds) for key, one in held}
    if kind == "bytes":
        return base64.b64decode(held, validate=True)
    if kind == "path":
        return Path(held)
    if kind not in kinds:
        raise ValueError(f"a {kind} was sent, and {', '.join(kinds) or 'no dataclass'} is expected")
    return kinds[kind](**{name: _read(one, kinds) for name, one in held.items()})


_CONTAINERS: Mapping[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}
