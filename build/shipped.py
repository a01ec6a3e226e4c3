"""What a library's wheel and sdist hold, by its pyproject.toml, and what the modules in it import."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

DISTRIBUTIONS = {
    "PIL": "pillow",
    "huggingface_hub": "huggingface-hub",
    "math_verify": "math-verify",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
}
MODULE = re.compile(r"[\w.]+(:\w+)?")
"""What may name a module, alone or before an object in it."""


def project(root: Path, library: str) -> dict[str, Any]:
    """Return the pyproject.toml of a library."""
    return tomllib.loads((root / "libs" / library / "pyproject.toml").read_text())


def is_left_out(path: str, patterns: list[str]) -> bool:
    """Return whether a file is excluded: `*_test.py` anywhere, `/folder` and `/folder/file` from the library on."""
    ends = tuple(pattern[1:] for pattern in patterns if pattern.startswith("*"))
    places = [pattern for pattern in patterns if pattern.startswith("/")]
    return path.endswith(ends) or any(f"/{path}/".startswith(f"{place}/") for place in places)


def files(root: Path, library: str) -> tuple[set[str], set[str]]:
    """Return the files of a library's package, by paths below its folder: those that are shipped, and the others."""
    folder, patterns = root / "libs" / library, project(root, library)["tool"]["hatch"]["build"]["exclude"]
    every = {str(path.relative_to(folder)) for path in (folder / library).rglob("*") if path.is_file()}
    every = {path for path in every if "__pycache__" not in path}
    out = {path for path in every if is_left_out(path, patterns)}
    return every - out, out


def module_name(path: str) -> str:
    """Return the module of a path: `seqpack/ops/conv.py` -> `seqpack.ops.conv`."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported(node: ast.AST, deep: bool = True) -> Iterator[str]:
    """Yield the dotted names that running this code may import, inside of functions too if `deep`.

    With a quote before them, words that may be modules' names.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if not deep and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.Constant) and MODULE.fullmatch(str(child.value)):
            yield f"'{str(child.value).partition(':')[0]}"
        yield from imported(child, deep)


@cache
def at_once(path: Path) -> frozenset[str]:
    """Return the modules that importing a module imports."""
    return frozenset(name for name in imported(ast.parse(path.read_text()), deep=False) if not name.startswith("'"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the imports of a module by statements or `import_module("...")`, when it is imported or later."""
    tree = ast.parse(path.read_text())
    names = {name for name in imported(tree) if not name.startswith("'")}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and node.args]
    named = [call.args[0] for call in calls if ast.unparse(call.func).split(".")[-1] == "import_module"]
    return frozenset(names) | {
        node.value for node in named if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


@cache
def mentions(path: Path) -> frozenset[str]:
    """Return the imports of a module, and each string in it that could name a module (`_EXPORTS`, "module:object")."""
    return frozenset(name.removeprefix("'") for name in imported(ast.parse(path.read_text())))


def distribution(module: str) -> str:
    """Return the distribution of a module."""
    top = module.partition(".")[0]
    return DISTRIBUTIONS.get(top, top)


def asked_for(root: Path, library: str, extra: str | None = None) -> set[str]:
    """Return the distributions that a library requires, with those of an extra; `tessera-x[y]` adds those of x's y."""
    about = project(root, library)["project"]
    own = f"tessera-{library.replace('_', '-')}"
    names: set[str] = set()
    for need in [*about["dependencies"], *(about["optional-dependencies"][extra] if extra else ())]:
        match = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", need)
        assert match is not None, need
        if match[1] == own:
            for name in match[2].split(","):
                names |= asked_for(root, library, name)
        else:
            names.add(match[1].removeprefix("tessera-").replace("-", "_") if "tessera" in match[1] else match[1])
    return names
