"""Plans as data: JSON text and a short hash that every rank can compare."""

import hashlib
import json
from dataclasses import asdict
from typing import Any


def to_json(plan: Any) -> str:
    """Return the plan, a dataclass of plain values, as JSON; `kind` names its class."""
    return json.dumps({"kind": type(plan).__name__, **asdict(plan)}, separators=(",", ":"), allow_nan=False)


def plan_hash(text: str) -> int:
    """Return 52 bits of the text's SHA-256: exact in an int64 and in a float64, so any all-reduce can carry it."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 12


def from_json(text: str, kind: str) -> dict[str, Any]:
    """Return the fields of a plan of that kind, lists as tuples. ValueError for other JSON."""
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not a plan: {error}") from error
    if not isinstance(data, dict) or data.get("kind") != kind:
        found = data.get("kind") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"expected a plan of kind {kind!r}, got {found!r}")
    return {key: _frozen(value) for key, value in data.items() if key != "kind"}


def _frozen(value: Any) -> Any:
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value
