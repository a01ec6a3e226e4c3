"""The code of a model of transformers, without what tells nothing of its numbers: to see which config fields it reads.

Left out are modules that the model lacks, texts, defaults of arguments, what draws first values of weights (a
checkpoint replaces them), the router's loss, and values that are stored and never read again.
"""

import ast
import inspect
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from torch import Tensor, nn
from transformers import masking_utils, modeling_rope_utils

from engines.prove.small_config import THRESHOLDS


def modeling_code(model: Any, gradients: Mapping[str, Tensor]) -> str:
    """Return the code of a model: of the modules in its text part, not of others in the same files, and of all
    functions and other classes in these files. `gradients`: of each parameter, on text alone.
    """
    own = {kind for part in _text_modules(model, gradients) for kind in type(part).__mro__}
    files = {inspect.getmodule(kind) for kind in own if kind.__module__.startswith("transformers.models")}
    parts = [_code(modeling_rope_utils, frozenset()), _code(masking_utils, frozenset())]
    for file in filter(None, files):
        modules = {name for name, one in vars(file).items() if inspect.isclass(one) and issubclass(one, nn.Module)}
        parts.append(_code(file, frozenset(modules - {one.__name__ for one in own if one.__module__ == file.__name__})))
    return "\n".join(parts)


def _text_modules(model: Any, gradients: Mapping[str, Tensor]) -> Iterable[Any]:
    """Return the modules of the decoder, those around it, and others that text reaches: none of a tower of images."""
    decoder = model.get_decoder()
    if decoder is None or decoder is model:
        yield from model.modules()
        return
    yield from decoder.modules()
    for place, part in model.named_modules():
        own = [name for name, _ in part.named_parameters(place)]
        if not own or any(name in gradients and bool(gradients[name].any()) for name in own):
            yield part


@cache
def _code(file: Any, absent: frozenset[str]) -> str:
    """Return the code of a file's functions and classes but those `absent`."""
    body = ast.parse(inspect.getsource(file)).body
    kept = [one for one in body if isinstance(one, ast.ClassDef | ast.FunctionDef) and one.name not in absent]
    plain = [one for one in map(_WithoutFirstValues().visit, kept) if one is not None]
    read = _WithoutStores(frozenset(_names_read(plain)))
    return "\n".join(ast.unparse(read.visit(one)) for one in plain)


def _names_read(nodes: Iterable[ast.AST]) -> Iterable[str]:
    """Return the attributes that code reads of anything but a config, and all texts, which may name one."""
    for node in (part for one in nodes for part in ast.walk(one)):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and not _is_config(node.value):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def _is_config(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("config")


class _WithoutFirstValues(ast.NodeTransformer):
    """A tree without documentation, defaults of arguments, and what draws first values of weights."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        """Leave initialisation and defaults out."""
        if "init" in node.name and "weights" in node.name:
            return None
        node.args.defaults, node.args.kw_defaults = [], [None] * len(node.args.kwonlyargs)
        return self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Put nothing in the place of a parameter's first values and of the router's loss, which is held elsewhere."""
        made = ast.unparse(node.value.func) if isinstance(node.value, ast.Call) else ""
        return ast.Pass() if made in ("nn.Parameter", "load_balancing_loss_func") else self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Put nothing in the place of a text that stands for itself."""
        return ast.Pass() if isinstance(node.value, ast.Constant) else self.generic_visit(node)


class _WithoutStores(ast.NodeTransformer):
    """A tree without `self.NAME = ...` where nothing in `read` is that name; lengths are kept, as attention functions
    of other files may read them."""

    def __init__(self, read: frozenset[str]) -> None:
        self._read = read.union(THRESHOLDS)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Put nothing in the place of a value that is never read."""
        target = node.targets[0]
        plain = isinstance(node.value, ast.Attribute | ast.Call) and len(node.targets) == 1
        if plain and isinstance(target, ast.Attribute) and target.attr not in self._read and _of_config(node.value):
            return ast.Pass()
        return self.generic_visit(node)


def _of_config(value: ast.AST) -> bool:
    """Return whether a value is a config's field, or a number made of one."""
    if isinstance(value, ast.Call):
        return ast.unparse(value.func) in ("int", "float") and len(value.args) == 1 and _of_config(value.args[0])
    return isinstance(value, ast.Attribute) and _is_config(value.value)
