"""Plans as data: JSON text and a short hash that every rank can compare."""

import hashlib
import json
from dataclasses import fields
from typing import Any, TypeVar

Plan = TypeVar("Plan")


def to_json(plan: Any) -> str:
    """Return the plan, a dataclass of plain values, as JSON; `kind` names its class."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return json.dumps({"kind": type(plan).__name__, **values}, separators=(",", ":"), allow_nan=False)


def plan_hash(text: str) -> int:
    """Return 52 bits of the text's SHA-256, exact in int64 and float64, so that any all-reduce can carry them."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12


def from_json(plan_type: type[Plan], text: str) -> Plan:
    """Return the plan of that type that `to_json` wrote. ValueError for other JSON."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a plan: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != plan_type.__name__:
        kind = data.get("kind") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"expected a plan of kind {plan_type.__name__!r}, got {kind!r}")
    try:
        return plan_type(**{key: _frozen(value) for key, value in data.items() if key != "kind"})
    except TypeError as error:
        raise ValueError(f"not a whole {plan_type.__name__}: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
