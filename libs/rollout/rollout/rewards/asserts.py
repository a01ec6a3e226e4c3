"""Tests that are plain asserts: which parts a program's sandbox computes, and what is decided outside.

What a program's functions return is data (`sandbox.run.encoded`). Comparisons, arithmetic, `and`, `or`, `not` and the
functions in `FUNCTIONS` are computed outside, from that data, so that a program that replaces `math.isclose`, or
returns an object that claims to be less than everything, gains nothing.
"""

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

FORM = (
    "a test is `assert` with a program's calls, literals, comparisons, arithmetic, `and`, `or`, `not` and "
    "abs, len, sorted, set, round, sum, min, max, math.isclose, pytest.approx; or an import"
)
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{f.__name__: f for f in (abs, len, sorted, round, sum, min, max)},
    **dict.fromkeys(("math.isclose", "isclose"), math.isclose),
    "set": lambda *values: set(map(_hashable, *values)) if values else set(),
    "list": list,
    "tuple": list,
}
APPROXIMATE = ("pytest.approx", "approx")
_TERMS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_ORDERS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip


def sandboxed_parts(test: ast.expr) -> list[str]:
    """Return the parts of a test that its program computes, in order. Raise ValueError for what is decided nowhere."""
    if isinstance(test, ast.Compare):
        return [part for side in (test.left, *test.comparators) for part in sandboxed_parts(side)]
    if isinstance(test, ast.BoolOp):
        return [part for value in test.values for part in sandboxed_parts(value)]
    if isinstance(test, ast.UnaryOp):
        return sandboxed_parts(test.operand)
    if isinstance(test, ast.BinOp) and type(test.op) in _TERMS:
        return [*sandboxed_parts(test.left), *sandboxed_parts(test.right)]
    if isinstance(test, ast.Call) and ast.unparse(test.func) in (*FUNCTIONS, *APPROXIMATE):
        return [part for given in (*test.args, *(k.value for k in test.keywords)) for part in sandboxed_parts(given)]
    if isinstance(test, ast.Call | ast.Subscript | ast.Attribute | ast.Name):
        first: ast.expr = test
        while isinstance(first, ast.Call | ast.Subscript | ast.Attribute):
            first = first.func if isinstance(first, ast.Call) else first.value
        if not isinstance(first, ast.Name) or first.id not in (
            "all",
            "any",
            "isinstance",
            "hasattr",
            "bool",
            "issubclass",
        ):
            return [ast.unparse(test)]
    try:
        ast.literal_eval(test)
    except ValueError:
        raise ValueError(f"{FORM}; not so: {ast.unparse(test)}") from None
    return []


def holds(test: ast.expr, values: list[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Return whether a test holds, given the encoded values of its sandboxed parts; `same` compares two values."""
    rest = iter(values)
    try:
        return bool(_value(test, rest, same))
    except (TypeError, ValueError, ArithmeticError, LookupError):
        return False  # as the assert itself would have failed


def _value(test: ast.expr, rest: Any, same: Callable[[Any, Any], bool]) -> Any:
    if isinstance(test, ast.Compare):
        sides = [_value(side, rest, same) for side in (test.left, *test.comparators)]
        return all(_compared(op, *pair, same) for op, pair in zip(test.ops, itertools.pairwise(sides), strict=True))
    if isinstance(test, ast.BoolOp):
        parts = [bool(_value(value, rest, same)) for value in test.values]  # each takes its values
        return all(parts) if isinstance(test.op, ast.And) else any(parts)
    if isinstance(test, ast.UnaryOp):
        value = _value(test.operand, rest, same)
        return not value if isinstance(test.op, ast.Not) else -value if isinstance(test.op, ast.USub) else +value
    if isinstance(test, ast.BinOp) and type(test.op) in _TERMS:
        one, other = _value(test.left, rest, same), _value(test.right, rest, same)
        if isinstance(test.op, ast.Mult | ast.Mod) and not isinstance(one, int | float):
            raise TypeError("numbers alone are multiplied")
        return _TERMS[type(test.op)](one, other)
    if isinstance(test, ast.Call) and (name := ast.unparse(test.func)) in (*FUNCTIONS, *APPROXIMATE):
        given = [_value(value, rest, same) for value in test.args]
        named = {k.arg: _value(k.value, rest, same) for k in test.keywords if k.arg}
        return Approximate(*given, **named) if name in APPROXIMATE else FUNCTIONS[name](*given, **named)
    if sandboxed_parts(test):
        return _decoded(next(rest))
    return ast.literal_eval(test)


def _compared(op: ast.cmpop, one: Any, other: Any, same: Callable[[Any, Any], bool]) -> bool:
    if isinstance(op, ast.In | ast.NotIn):
        inside = one in other if isinstance(other, str) else any(same(one, value) for value in other)
        return inside is isinstance(op, ast.In)
    if type(op) in _ORDERS:
        return _ORDERS[type(op)](one, other)
    negated = isinstance(op, ast.NotEq | ast.IsNot)
    if isinstance(one, Approximate) or isinstance(other, Approximate):
        return (one == other) is not negated
    return (
        type(one) is type(other) and same(one, other) if isinstance(op, ast.Is | ast.IsNot) else same(one, other)
    ) is not negated


class Approximate:
    """A number, or several, as `pytest.approx` compares them."""

    def __init__(self, expected: Any, rel: float = 1e-6, abs: float = 1e-12) -> None:  # noqa: A002  pytest's name
        self._expected, self._near = expected, {"rel_tol": rel, "abs_tol": abs}

    def __eq__(self, other: object) -> bool:
        pairs = [(self._expected, other)]
        if isinstance(self._expected, list | tuple):
            pairs = list(zip(self._expected, other if isinstance(other, list) else (), strict=True))
        return all(math.isclose(a, b, **self._near) for a, b in pairs)  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


def _decoded(value: Any) -> Any:
    """Return the value that `sandbox.run.encoded` encoded. Raise TypeError for an object, which is no data."""
    if isinstance(value, list):
        return [_decoded(part) for part in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "float":
        return float(inner)
    if kind == "dict":
        return {_hashable(_decoded(key)): _decoded(part) for key, part in inner}
    if kind == "set":
        return {_hashable(_decoded(part)) for part in inner}
    raise TypeError(f"an object of class {inner} is no data")


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value
