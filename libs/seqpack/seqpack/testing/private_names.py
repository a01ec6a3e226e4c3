"""Private names of other packages in a library's code: `private_names(folder)` lists those outside of its private_api.

A library gathers them in one file, so that a new version of a package is held to one list.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from torch import Tensor, nn

FILE = "private_api.py"
_DOCUMENTED = frozenset(["_", "_asdict", "_exit", "_fields", "_getframe", "_replace"])
"""Names that the standard library documents."""
_BY_NAME = frozenset(["delattr", "getattr", "hasattr", "setattr"])


def private_names(folder: Path) -> list[str]:
    """Return "file:line name" of each private name of other packages, tests and `FILE` left out.

    Those that are imported, and attributes that no code of the folder defines, also as a string (`getattr`, `vars`), or
    that torch's tensors or modules have too and are taken of another object than `self`.
    """
    files = [path for path in sorted(folder.rglob("*.py")) if not path.name.endswith("_test.py") and path.name != FILE]
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    return [
        f"{path.relative_to(folder)}:{getattr(node, 'lineno', 0)} {name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for name in (*_imported(node), *_used(node, own))
    ]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in _DOCUMENTED


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines: functions, classes, variables, attributes assigned, members by a dict."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr
    elif isinstance(node, ast.Dict):
        yield from (key.value for key in node.keys if isinstance(key, ast.Constant) and isinstance(key.value, str))


def _imported(node: ast.AST) -> Iterator[str]:
    """Yield the imported names with a private part, by their package."""
    if isinstance(node, ast.ImportFrom):
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
    yield from (name for name in names if any(map(_private, name.split("."))))


def _used(node: ast.AST, own: set[str]) -> Iterator[str]:
    """Yield the private names that a node takes of an object of another package."""
    if isinstance(node, ast.Attribute) and _private(node.attr):
        shadowed = node.attr in _torch_names() and ast.unparse(node.value) not in ("self", "cls", "super()")
        if node.attr not in own or shadowed:
            yield node.attr
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in _BY_NAME and len(node.args) > 1:
        yield from _foreign(node.args[1], own)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value).startswith("vars("):
        yield from _foreign(node.slice, own)


def _foreign(name: ast.AST, own: set[str]) -> Iterator[str]:
    if (
        isinstance(name, ast.Constant)
        and isinstance(name.value, str)
        and _private(name.value)
        and name.value not in own
    ):
        yield name.value


@cache
def _torch_names() -> frozenset[str]:
    """Return the private attributes of tensors and of modules."""
    return frozenset(filter(_private, [*dir(Tensor), *vars(nn.Module())]))
