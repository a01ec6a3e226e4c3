"""Read names and signatures out of torch_npu's wheel, without importing it: `python -m ... WHEEL > surface.json`.

Three sources in the wheel: the Python of `torch_npu.npu` (what `__all__` lists, followed through its imports to the
definition), the operators that `npu_native_functions_by_codegen.yaml` defines, and the names of backward nodes in the
library (`at_npu::autograd::generated`), which tell operators that autograd knows.
"""

import ast
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import yaml

OPERATORS = "torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml"
LIBRARY = "torch_npu/lib/libtorch_npu.so"


def read_surface(wheel: Path) -> dict[str, Any]:
    """Return version, `torch_npu.npu` and operators of the wheel; ValueError where a public name has no definition."""
    with ZipFile(wheel) as archive:
        modules = _Modules(archive)
        functions, classes, variables = {}, {}, []
        for name in sorted(modules.exports("torch_npu.npu")):
            definition = modules.find("torch_npu.npu", name)
            if isinstance(definition, ast.FunctionDef):
                functions[name] = ast.unparse(definition.args)
            elif isinstance(definition, ast.ClassDef):
                classes[name] = _initializer(definition)
            else:
                variables.append(name)  # assigned, or made when the module is imported
        described = yaml.safe_load(archive.read(OPERATORS))
        nodes = set(_nodes(archive.read(LIBRARY)))
        operators = sorted({entry["func"] for entry in described["custom"]})
        names = {re.split(r"[.(]", operator)[0] for operator in operators}
    return {
        "version": wheel.name.split("-")[1],
        "functions": functions,
        "classes": classes,
        "variables": variables,
        "operators": operators,
        "differentiable": sorted(name for name in names if _node_of(name) in nodes),
    }


@dataclass(frozen=True)
class _Modules:
    """The Python modules in a wheel."""

    archive: ZipFile

    def tree(self, module: str) -> tuple[ast.Module, bool] | None:
        """Return the parsed module, and whether it is a package; None for what is not in the wheel."""
        base = module.replace(".", "/")
        for path, package in ((f"{base}.py", False), (f"{base}/__init__.py", True)):
            if path in self.archive.namelist():
                return ast.parse(self.archive.read(path).decode("utf-8-sig")), package
        return None

    def exports(self, module: str) -> list[str]:
        """Return `__all__` of a module."""
        tree = self.tree(module)
        for node in tree[0].body if tree else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                return list(ast.literal_eval(node.value))
        raise ValueError(f"{module} has no __all__ in this wheel")

    def find(self, module: str, name: str) -> ast.AST | None:
        """Return the definition behind a name of a module, through imports; None for anything but functions and
        classes."""
        parsed = self.tree(module)
        if parsed is None:
            return None
        tree, package = parsed
        for node in _statements(tree.body):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
                return node
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name or alias.name == "*":
                        there = self.find(_absolute(module, package, node), name if alias.name == "*" else alias.name)
                        if there is not None:
                            return there
        return None


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module, those under `if` and `try` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try):
            yield from _statements([*node.body, *node.orelse])


def _absolute(module: str, package: bool, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    base = parts[: len(parts) - node.level + package]
    return ".".join([*base, node.module] if node.module else base)


def _initializer(node: ast.ClassDef) -> str | None:
    """Return the arguments of `__new__` or `__init__` without the first; None for a class that has neither."""
    for name in ("__new__", "__init__"):
        for member in node.body:
            if isinstance(member, ast.FunctionDef) and member.name == name:
                arguments = member.args
                del arguments.args[0]
                return ast.unparse(arguments)
    return None


def _nodes(library: bytes) -> Iterator[str]:
    """Yield NpuRmsNorm for a class NpuRmsNormBackward0, from mangled names, which begin with their length."""
    for match in re.finditer(rb"at_npu8autograd9generated(\d+)", library):
        name = library[match.end() : match.end() + int(match[1])].decode(errors="replace")
        if whole := re.fullmatch(r"(\w+)Backward\d+", name):
            yield whole[1]


def _node_of(operator: str) -> str:
    """Return NpuRmsNorm for npu_rms_norm, as torch's generator names a backward node; also in place, or private."""
    return "".join(part.title() for part in operator.split("_"))


if __name__ == "__main__":
    json.dump(read_surface(Path(sys.argv[1])), sys.stdout, indent=0, sort_keys=True)
    sys.stdout.write("\n")
