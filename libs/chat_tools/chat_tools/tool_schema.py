"""Tool schemas from typed Python functions with docstrings."""

from __future__ import annotations

from typing import Any


def function_schema(function: Any) -> dict[str, Any]:
    """Return the OpenAI-style schema of a typed function."""
    raise ValueError(f"a tool must be a dict so far, not {function!r}")
