"""Private names of other packages in a library's code: `private_names(folder)` lists those outside of its private_api.

A library gathers them in one file, so that a new version of a package is held to one list.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

FILE = "private_api.py"
_PACKAGES = ("torch", "transformers", "megatron")
_DOCUMENTED = frozenset(["_", "_exit", "_getframe", "_replace"])
"""Names that the standard library documents."""


def private_names(folder: Path) -> list[str]:
    """Return "file:line name" of each private name of torch, transformers and megatron-core, tests and `FILE` left out.

    Those that are imported, and attributes that no code of the folder defines.
    """
    files = [path for path in sorted(folder.rglob("*.py")) if not path.name.endswith("_test.py") and path.name != FILE]
    trees = {path: ast.parse(path.read_text()) for path in files}
    own = {name for tree in trees.values() for node in ast.walk(tree) for name in _defined(node)}
    return [
        f"{path.relative_to(folder)}:{getattr(node, 'lineno', 0)} {name}"
        for path, tree in trees.items()
        for node in ast.walk(tree)
        for name in _used(node)
        if (_private(name.rpartition(".")[2]) and name not in own) or name.startswith(_PACKAGES)
    ]


def _private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in _DOCUMENTED


def _defined(node: ast.AST) -> Iterator[str]:
    """Yield the names that a node defines: functions, classes, variables and attributes that are assigned."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
        yield node.attr


def _used(node: ast.AST) -> Iterator[str]:
    """Yield the private names that a node takes: imported ones by their package, attributes alone."""
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in _PACKAGES:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
        yield from (name for name in names if any(map(_private, name.split("."))))
    elif isinstance(node, ast.Import):
        names = [alias.name for alias in node.names if alias.name.split(".")[0] in _PACKAGES]
        yield from (name for name in names if any(map(_private, name.split("."))))
    elif isinstance(node, ast.Attribute) and _private(node.attr):
        yield node.attr
