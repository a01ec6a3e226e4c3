"""Rules for how docstrings begin, for house.py: functions with a verb in the imperative, the rest with a noun."""

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

VERBS = frozenset((Path(__file__).parent / "docstring_verbs.txt").read_text().split())
"""Verbs with which the docstring of a function may begin; add one where none of them says it."""
OPENING = re.compile(r"[A-Za-z][\w-]*|\S+")
THIRD_PERSON = re.compile(
    r"([A-Z][a-z]+s) (?=(?:an?|all|each|every|how|its|nothing|one|the|this|up|what|where|whether)\b|`)"
)
"""A verb and its object: "Counts the tokens", while "Counts of tokens" begins with a noun."""
EXEMPT = {"property", "cached_property", "abstractproperty", "setter", "overload"}


def check_docstrings(path: str, tree: ast.Module) -> list[str]:
    """Return complaints about how the docstrings of a file begin."""
    complaints = []
    for name, line, text, is_function in _docstrings(tree):
        fault = _no_verb(text) if is_function else _third_person(text)
        complaints += [f"{path}:{line}: {name}: begins with {fault}"] if fault else []
    return complaints


def _docstrings(tree: ast.Module) -> Iterator[tuple[str, int, str, bool]]:
    """Yield the docstrings of functions, classes and fields: name, line, text, and whether a verb has to begin it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno, ast.get_docstring(node) or "", not _is_exempt(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, node.lineno, ast.get_docstring(node) or "", False
        if isinstance(node, ast.Module | ast.ClassDef):
            for field, after in pairwise(node.body):
                if isinstance(field, ast.Assign | ast.AnnAssign) and isinstance(after, ast.Expr):
                    text = after.value.value if isinstance(after.value, ast.Constant) else ""
                    yield ast.unparse(field).partition(" ")[0].rstrip(":"), field.lineno, str(text), False


def _is_exempt(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function needs no verb: properties, overloads, `visit_...` and dunder methods."""
    decorators = {ast.unparse(one).rpartition(".")[2] for one in node.decorator_list}
    return not decorators.isdisjoint(EXEMPT) or node.name.startswith(("visit_", "__"))


def _no_verb(text: str) -> str:
    """Return what the docstring of a function begins with, and how to write it, or "" where it is right."""
    opening = OPENING.match(text)
    if opening is None or opening[0] in VERBS or text.startswith("See `"):
        return ""
    return (
        f"{opening[0]!r}: write a verb in the imperative ('Return the ...', 'Return whether ...', 'Raise ValueError "
        "where ...'), a line of build/docstring_verbs.txt"
    )


def _third_person(text: str) -> str:
    """Return which third-person verb begins the docstring of a class or field, and how to write it, or ""."""
    opening = THIRD_PERSON.match(text)
    if opening is None or VERBS.isdisjoint(_bases(opening[1])):
        return ""
    return f"{opening[1]!r}, a verb in the third person: write a noun ('Number of ...', 'The ...')"


def _bases(verb: str) -> set[str]:
    """Return the imperatives that a verb in the third person may come from."""
    return {verb[:-1], verb.removesuffix("es"), verb.removesuffix("ies") + "y"}
