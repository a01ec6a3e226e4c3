"""Names and signatures of torch_npu, as `testing.read_npu_wheel` read them from the wheel."""

import ast
import inspect
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("surface.json")


@dataclass(frozen=True)
class Surface:
    """Names and signatures of one release."""

    version: str
    functions: dict[str, str]
    """Arguments of each function of torch_npu.npu, as they are written."""
    classes: dict[str, str | None]
    """Arguments of the initializer of each class of torch_npu.npu, where it has one."""
    variables: list[str]
    operators: list[str]
    """Schemas of torch.ops.npu, as torch.library reads them."""
    differentiable: list[str]
    """Operators that autograd knows."""

    def names(self) -> set[str]:
        """Return all names of torch_npu.npu."""
        return {*self.functions, *self.classes, *self.variables}

    def operator_names(self) -> set[str]:
        """Return the names of operators, without overloads."""
        return {schema.partition("(")[0].partition(".")[0] for schema in self.operators}


@cache
def read_surface() -> Surface:
    """Return the committed surface."""
    return Surface(**json.loads(FILE.read_text()))


def signature(arguments: str) -> inspect.Signature:
    """Return a signature from the text of its arguments, with their defaults where these are literals."""
    node = ast.parse(f"def f({arguments}): pass").body[0]
    assert isinstance(node, ast.FunctionDef)
    parsed = node.args
    kinds = inspect.Parameter
    parameters = []
    plain = [*parsed.posonlyargs, *parsed.args]
    missing = [None] * (len(plain) - len(parsed.defaults))
    for argument, default in zip(plain, [*missing, *parsed.defaults], strict=True):
        parameters.append(kinds(argument.arg, kinds.POSITIONAL_OR_KEYWORD, default=_default(default)))
    if parsed.vararg:
        parameters.append(kinds(parsed.vararg.arg, kinds.VAR_POSITIONAL))
    for argument, default in zip(parsed.kwonlyargs, parsed.kw_defaults, strict=True):
        parameters.append(kinds(argument.arg, kinds.KEYWORD_ONLY, default=_default(default)))
    if parsed.kwarg:
        parameters.append(kinds(parsed.kwarg.arg, kinds.VAR_KEYWORD))
    return inspect.Signature(parameters)


def _default(node: ast.expr | None) -> Any:
    return inspect.Parameter.empty if node is None else ast.literal_eval(node)
