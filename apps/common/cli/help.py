"""The help of an app: the flags that most runs need in groups (`--help`), and all of them (`--help-all`)."""

import ast
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from apps.common.cli.flags import flag, leaves, plain_type

HELP, HELP_ALL = ("-h", "--help"), ("--help-all", "--help-cluster")
WIDTH, INDENT = 110, 8
Groups = Mapping[str, Sequence[str]]
"""Titles of a short help, each with the dotted paths of its fields."""


def short_help(
    prog: str, kind: type, default: Any, groups: Groups, kinds: Mapping[str, Any], commands: Mapping[str, str]
) -> str:
    """Return the help of the fields in `groups`.

    `kinds`: types of flags that are not their field's. `commands`: flags that are of no field, each with its text.
    """
    lines = list(_head(prog, kind))
    values = {path: value for path, value, _ in leaves(default)}
    for title, paths in groups.items():
        lines += ["", f"{title}:", *(line for path in paths for line in _entry(kind, path, values[path], kinds))]
    rest = len(values) - sum(map(len, groups.values()))
    return "\n".join([*lines, *_commands(commands), "", f"{rest} more flags: {prog} --help-all", ""])


def long_help(
    prog: str, kind: type, default: Any, owned: Iterable[str], kinds: Mapping[str, Any], commands: Mapping[str, str]
) -> str:
    """Return the help of all flags, by the part of their names before the dot.

    `owned`: fields without a flag. `kinds`, `commands`: see `short_help`.
    """
    parts: dict[str, list[str]] = {"": []}
    for path, value, _ in leaves(default):
        if path not in owned:
            group = flag(path).removeprefix("--").rpartition(".")[0].partition(".")[0]
            parts.setdefault(group, []).extend(_entry(kind, path, value, kinds))
    lines = list(_head(prog, kind))
    for group, entries in parts.items():
        lines += ["", f"--{group}.*:" if group else "The run, its data and its steps:", *entries]
    return "\n".join([*lines, *_commands(commands), ""])


def _head(prog: str, kind: type) -> Iterator[str]:
    yield f"usage: {prog} [FLAGS]"
    yield ""
    yield inspect.getdoc(kind) or ""


def _commands(commands: Mapping[str, str]) -> Iterator[str]:
    yield ""
    yield "Instead of a run, or around it:"
    for name, text in commands.items():
        yield f"  {name}"
        yield from textwrap.wrap(text, WIDTH - INDENT, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT)


def _entry(kind: type, path: str, value: Any, kinds: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines of a field: its flag, the values that it takes, what it is, and its default."""
    owner, _, name = path.rpartition(".")
    holder = kind
    for part in filter(None, owner.split(".")):
        holder = plain_type(get_type_hints(holder, include_extras=True)[part])
    hint = kinds.get(path) or get_type_hints(holder, include_extras=True)[name]
    extra = hint.__metadata__ if get_origin(hint) is Annotated else ()
    text = next((own for one in extra if (own := getattr(one, "help", None))), None) or _docs(holder).get(name, "")
    shown = next((own for one in extra if (own := getattr(one, "metavar", None))), None) or _values(hint)
    known = flag(path)
    yield f"  {known}, {_negative(known)}" if plain_type(hint) is bool else f"  {known} {shown}"
    about = f"{' '.join(text.split())} (default: {_shown(value)})".strip()
    yield from textwrap.wrap(
        about, WIDTH - INDENT, initial_indent=" " * INDENT, subsequent_indent=" " * INDENT, break_on_hyphens=False
    )


def _negative(name: str) -> str:
    before, dot, last = name.removeprefix("--").rpartition(".")
    return f"--{before}{dot}no-{last}"


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return {None: "none", True: "yes", False: "no"}.get(value, str(value)) if not _number(value) else str(value)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _values(hint: Any) -> str:
    """Return what stands for the value of a flag: a type in capitals, or the choices."""
    hint = plain_type(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return _values(next(one for one in inner if one is not type(None)))
    if origin is Literal:
        return "{" + ",".join(map(str, (one for one in inner if one is not None))) + "}"
    if origin is tuple:
        return f"[{_values(inner[0])} ...]" if inner[-1] is Ellipsis else " ".join(map(_values, inner))
    return {str: "TEXT", int: "INT", float: "FLOAT", Path: "PATH", bool: "{True,False}"}.get(hint, str(hint))


@cache
def _docs(kind: type) -> dict[str, str]:
    """Return the texts under the fields of a class, and of the classes it derives from."""
    texts = {}
    for base in reversed(kind.__mro__[:-1]):
        body: Any = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        for entry, after in zip(body.body, body.body[1:], strict=False):
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if described and isinstance(entry, ast.AnnAssign) and isinstance(entry.target, ast.Name):
                texts[entry.target.id] = str(after.value.value)
    return texts
