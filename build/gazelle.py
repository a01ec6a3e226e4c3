"""Writes the BUILD files from the imports of the Python files: `./bazelw run //build:gazelle` (or `-- --check`).

Each file of a library or an app is one target; what it imports is its `deps`. Run it after adding, moving or removing a
file, or after changing an import. A package that reads its own `__path__` (a registry of its files) needs all of them;
a lazy facade needs what `_EXPORTS` names. Kept as they stand: attributes but `deps` (size, tags, data, env, ...),
a dependency marked `# keep` (what an import does not show, such as a package that is loaded by name), rules that are
not modules or tests, and comments above those.
"""

import argparse
import ast
import os
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from install_hub import lock_entries, normal

MODULE_RULES = {"module", "app_module"}
TEST_RULES = {"module_test", "app_test"}
MANAGED = MODULE_RULES | TEST_RULES | {"library", "app"}
# Imports whose distribution has another name.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "tensorboardX": "tensorboardx",
    "yaml": "pyyaml",
}
LOCKS = {"pypi": "cpu"}


@dataclass
class Rule:
    """One call in a BUILD file: its function, the source of each keyword but `deps`, and the deps to keep."""

    kind: str
    name: str
    attributes: dict[str, str] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    deps: list[str] = field(default_factory=list)
    comment: str = ""

    @property
    def hub(self) -> str:
        """The hub its third-party packages come from."""
        return ast.literal_eval(self.attributes.get("hub", '"pypi"'))

    @property
    def sources(self) -> list[str]:
        """Its `srcs` if they are spelled out, or a program's `main`."""
        if self.kind == "app":
            return [ast.literal_eval(self.attributes["main"])]
        return ast.literal_eval(self.attributes.get("srcs", "[]"))


@cache
def locked(hub: str) -> frozenset[str]:
    """The distributions that a hub's lock file lists."""
    name = LOCKS.get(hub, hub.removeprefix("pypi_"))
    return frozenset(lock_entries(Path("build/locks") / f"{name}.txt"))


def is_type_checking(node: ast.AST) -> bool:
    """Whether this is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST) -> set[tuple[str, str]]:
    """(module, name) of each import that runs; the name is "" for `import module`."""
    found: set[tuple[str, str]] = set()
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            assert isinstance(node, ast.If)
            for child in node.orelse:
                found |= imports(child)
            continue
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
        found |= imports(node)
    return found


@cache
def imports_of(path: Path) -> frozenset[tuple[str, str]]:
    """The imports of a file."""
    return frozenset(imports(ast.parse(path.read_text())))


@cache
def exports(path: Path) -> dict[str, str]:
    """name -> module of a lazy `__init__.py`, its `_EXPORTS`."""
    text = path.read_text()
    for node in ast.parse(text).body if "_EXPORTS" in text else ():
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "_EXPORTS":
                return ast.literal_eval(node.value)
    return {}


def registered(path: Path) -> list[Path]:
    """The files beside an `__init__.py` that finds them by its `__path__`."""
    if path.name != "__init__.py" or "__path__" not in path.read_text():
        return []
    return [other for other in sorted(path.parent.glob("*.py")) if other != path and not other.stem.endswith("_test")]


class Tree:
    """Where the Python files of the house are, by the dotted names they are imported under."""

    def __init__(self) -> None:
        self.packages = [
            str(path.parent)
            for path in sorted([*Path("libs").glob("*/BUILD.bazel"), *Path("apps").glob("*/BUILD.bazel")])
        ]
        self.sources: dict[str, Path] = {}
        self.labels: dict[str, tuple[str, str]] = {}  # dotted name -> (Bazel package, target)
        for package in self.packages:
            root = source_root(package)
            for path in sorted(root.rglob("*.py")):
                target = target_of(path, root)
                base = Path() if package.startswith("apps/") else Path(package)
                dotted = ".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")
                self.sources[dotted] = path
                self.labels[dotted] = (package, target)

    def resolve(self, module: str, name: str) -> str | None:
        """The dotted name of the file that an import needs; None for what is not of the house."""
        if f"{module}.{name}" in self.sources:
            return f"{module}.{name}"
        if module not in self.sources:
            return None
        lazy = exports(self.sources[module]) if self.sources[module].name == "__init__.py" else {}
        return (self.resolve(lazy[name], name) or lazy[name]) if name in lazy else module

    def is_bare(self, dotted: str) -> bool:
        """Whether this is an `__init__.py` of nothing but words, which every module of its package brings along."""
        return self.sources[dotted].name == "__init__.py" and is_bare(self.sources[dotted])


def source_root(package: str) -> Path:
    """The folder of a Bazel package's Python files."""
    return Path(package) if package.startswith("apps/") else Path(package) / Path(package).name


def target_of(path: Path, root: Path) -> str:
    """The target of a file: its path, or its folder's for `__init__.py`."""
    if path.name != "__init__.py":
        return str(path.relative_to(root).with_suffix(""))
    return str(path.parent.relative_to(root)) if path.parent != root else root.name


def is_bare(path: Path) -> bool:
    """Whether a file imports and exports nothing."""
    return not exports(path) and not registered(path) and not imports_of(path)


def wanted_by(path: Path, readme: Path | None) -> set[tuple[str, str]]:
    """The imports of a file, of the modules that a lazy facade hands out, and of a README that it runs."""
    wanted = set(imports_of(path))
    if path.name == "__init__.py":
        wanted |= {(module, "") for module in exports(path).values()}
    for block in re.findall(r"^```python\n(.*?)^```", readme.read_text(), re.M | re.S) if readme else ():
        wanted |= imports(ast.parse(block))
    return wanted


def dependencies(tree: Tree, package: str, path: Path, hub: str, readme: Path | None = None) -> list[str]:
    """Labels and requirement() calls for one file."""
    found: set[str] = set()
    names = {file: dotted for dotted, file in tree.sources.items()}
    for module, name in wanted_by(path, readme) | {(names[file], "") for file in registered(path)}:
        dotted = tree.resolve(module, name)
        if dotted is not None:
            owner, target = tree.labels[dotted]
            if tree.sources[dotted] != path and not tree.is_bare(dotted):
                whole = f"//{owner}" if target == Path(owner).name else f"//{owner}:{target}"
                found.add(f'":{target}"' if owner == package else f'"{whole}"')
            continue
        distribution = normal(DISTRIBUTIONS.get(module.split(".")[0], module.split(".")[0]))
        if hub == "pypi" and distribution not in locked(hub) and distribution in locked("pypi_extras"):
            found.add(f'requirement("{distribution}", hub = "pypi_extras")')
        if distribution in locked(hub) and not (distribution == "pytest" and path.name.endswith("_test.py")):
            found.add(f'requirement("{distribution}"' + ("" if hub == "pypi" else f', hub = "{hub}"') + ")")
    return sorted(found, key=order)


def order(dep: str) -> tuple[int, str]:
    """Own package, other packages, third-party; each by name."""
    return (2 if dep.startswith("requirement") else 1 if dep.startswith('"//') else 0, dep.strip('"').replace(":", "!"))


def kept_entries(deps: str) -> list[str]:
    """The entries of a list, as the source has it, whose last line is marked `# keep`; each on one line."""
    lines = deps.splitlines()
    listed = ast.parse(deps, mode="eval").body
    entries = [node for node in listed.elts if node.end_lineno] if isinstance(listed, ast.List) else []
    return [one_line(node) for node in entries if lines[(node.end_lineno or 0) - 1].rstrip().endswith("# keep")]


def one_line(node: ast.expr) -> str:
    """A label or a requirement() call as this file writes it inside."""
    if isinstance(node, ast.Call):
        words = [one_line(word) for word in node.args] + [f"{k.arg} = {one_line(k.value)}" for k in node.keywords]
        return f"{ast.unparse(node.func)}({', '.join(words)})"
    return f'"{ast.literal_eval(node)}"'


def spread(entry: str, indent: int) -> str:
    """An entry as buildifier writes it: a call with more than one argument has a line for each."""
    call = re.fullmatch(r"(\w+)\((.+), (\w+ = .+)\)", entry)
    if not call:
        return entry
    blanks = " " * indent
    return f"{call[1]}(\n{blanks}    {call[2]},\n{blanks}    {call[3]},\n{blanks})"


def parse_build(text: str) -> tuple[str, list[Rule], list[str]]:
    """(head, managed rules, other statements as they stand) of a BUILD file."""
    lines = text.splitlines(keepends=True)
    rules, others, head = [], [], ""
    end = 0
    for node in ast.parse(text).body:
        above = "".join(lines[end : node.lineno - 1]).strip("\n")
        source = "".join(lines[node.lineno - 1 : node.end_lineno])
        end = node.end_lineno or 0
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        kind = call.func.id if call is not None and isinstance(call.func, ast.Name) else ""
        if kind == "load":
            head += source
        elif kind == "package":
            head += "\n" + (above + "\n" if above else "") + source
        elif call is not None and kind in MANAGED:
            attributes = {
                word.arg: ast.get_source_segment(text, word.value) or "" for word in call.keywords if word.arg
            }
            deps = attributes.pop("deps", "[]")
            name = ast.literal_eval(attributes.pop("name"))
            rules.append(Rule(kind, name, attributes, kept_entries(deps)))
        else:
            others.append((above + "\n" if above else "") + source)
    return head, rules, others


def layout(rule: Rule) -> str:
    """The rule as buildifier would write it."""
    lines = [f'    name = "{rule.name}",\n']
    first = ["size", "srcs"]
    keys = sorted(rule.attributes, key=lambda key: (first.index(key) if key in first else len(first), key))
    lines += [f"    {key} = {rule.attributes[key]},\n" for key in keys]
    kept = [dep for dep in rule.kept if dep not in rule.deps]
    entries = sorted({*rule.deps, *kept}, key=order)
    texts = [spread(dep, 8) + (",  # keep" if dep in kept else ",") for dep in entries]
    if len(texts) == 1 and not kept:
        lines.append(f"    deps = [{spread(entries[0], 4)}],\n")
    elif texts:
        lines.append("    deps = [\n" + "".join(f"        {text}\n" for text in texts) + "    ],\n")
    return f"{rule.kind}(\n{''.join(lines)})\n"


def generate(tree: Tree, package: str) -> str:
    """The text that a BUILD file should have."""
    folder, root = Path(package), source_root(package)
    prefix = "app_" if package.startswith("apps/") else ""
    head, rules, others = parse_build((folder / "BUILD.bazel").read_text())
    known = {rule.name: rule for rule in rules}
    programs = [rule for rule in rules if rule.kind == "app"]
    by_hand = [
        rule
        for rule in rules
        if rule.sources and rule.kind not in ("library", "app") and (folder / rule.sources[0]).exists()
    ]
    # A rule that names its file is kept; further rules may name the same file (another hub, other attributes).
    named = {
        path
        for rule in by_hand
        if (path := folder / rule.sources[0]).is_relative_to(root) and rule.name == target_of(path, root)
    }
    named |= {path for rule in programs if (path := folder / rule.sources[0]) == root / f"{rule.name}.py"}
    made = list(by_hand)
    for path in sorted(root.rglob("*.py")):
        if path in named or path == root / "__init__.py" or (path.name == "__init__.py" and is_bare(path)):
            continue
        kind = prefix + ("module_test" if path.name.endswith("_test.py") else "module")
        target = target_of(path, root)
        rule = known.get(target) or Rule(kind.replace("app_module_test", "app_test"), target)
        if path.name == "__init__.py":
            rule.attributes["srcs"] = f'["{path.relative_to(folder)}"]'
        made.append(rule)
    for rule in made:
        path = folder / rule.sources[0] if rule.sources else root / f"{rule.name}.py"
        readme = folder / "README.md" if '"README.md"' in rule.attributes.get("data", "") else None
        rule.deps = dependencies(tree, package, path, rule.hub, readme)
    top = [rule for rule in rules if rule.kind == "library"]
    for rule in top:
        rule.deps = dependencies(tree, package, root / "__init__.py", rule.hub)
    for rule in programs:
        path = folder / rule.sources[0]
        module = target_of(path, root) if path.is_relative_to(root) else ""
        is_module = any(rule.name == module for rule in made)
        rule.deps = [f'":{module}"'] if is_module else dependencies(tree, package, path, rule.hub)
    made.sort(key=lambda rule: (re.sub(r"(_gpu\d?|_tf\d+)?_test$", "~", rule.name), rule.name))
    return (
        head
        + "".join("\n" + layout(rule) for rule in [*top, *made, *programs])
        + "".join("\n" + text for text in others)
    )


def main() -> int:
    """Write, or with --check compare, every BUILD file of the libraries and apps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="only say which files are out of date")
    arguments = parser.parse_args()
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    tree = Tree()
    stale = 0
    for package in tree.packages:
        build = Path(package) / "BUILD.bazel"
        text = generate(tree, package)
        if text != build.read_text():
            stale += 1
            print(f"{build}: {'is out of date: ./bazelw run //build:gazelle' if arguments.check else 'written'}")
            if not arguments.check:
                build.write_text(text)
    return int(arguments.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
