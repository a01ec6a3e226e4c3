"""Write the BUILD files from the imports of the Python files: `./bazelw run //build:gazelle` (or `-- --check`).

Each folder of a library or an app is one target with its modules and one with its tests, both by glob: a new file
needs no edit, a new import or folder another run. The `folders` of a `package_test` are those whose tests it runs as
well. What the files import is their `deps`, but for what another of them brings along, and of tests the target of
their own name without `_test`. A module directly in the top folder has a target of its own, and so has a file for
which a `module` or `module_test` of its name stands in the BUILD file, or that `module_tests` names: its folder's
targets are without it (a test with tags, a size or an environment of its own, a module whose packages are not for all
who want its folder's other modules).

Folders that import each other cannot be two targets: gazelle names them, with an import of each direction, and writes
nothing. Kept as they stand: attributes but `deps` and `exclude` (size, tags, data, env, ...), a dependency marked
`# keep` (what an import does not show, such as a package that is loaded by name), rules that are of neither kind, and
comments above those.
"""

import argparse
import ast
import os
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from gazelle_rules import FILE_RULES, Build, Rule, order, parse_build, spelled, written
from install_hub import lock_entries, normal

# Imports whose distribution has another name.
DISTRIBUTIONS = {
    "PIL": "pillow",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "tensorboardX": "tensorboardx",
    "yaml": "pyyaml",
}
LOCKS = {"pypi": "cpu"}


@cache
def locked(hub: str) -> frozenset[str]:
    """Return the distributions in a hub's lock file."""
    name = LOCKS.get(hub, hub.removeprefix("pypi_"))
    return frozenset(lock_entries(Path("build/locks") / f"{name}.txt"))


def is_type_checking(node: ast.AST) -> bool:
    """Return whether this is `if TYPE_CHECKING:`."""
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


def imports(tree: ast.AST) -> set[tuple[str, str]]:
    """Return (module, name) of each import that runs; the name is "" for `import module`."""
    names: set[tuple[str, str]] = set()
    for node in ast.iter_child_nodes(tree):
        if is_type_checking(node):
            assert isinstance(node, ast.If)
            for child in node.orelse:
                names |= imports(child)
            continue
        if isinstance(node, ast.Import):
            names |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {(node.module, alias.name) for alias in node.names}
        names |= imports(node)
    return names


@cache
def imports_of(path: Path) -> frozenset[tuple[str, str]]:
    """Return the imports of a file."""
    return frozenset(imports(ast.parse(path.read_text())))


@cache
def exports(path: Path) -> dict[str, str]:
    """Return the `_EXPORTS` of a lazy `__init__.py`: {name: module}."""
    text = path.read_text()
    for node in ast.parse(text).body if "_EXPORTS" in text else ():
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and target.id == "_EXPORTS":
                return dict(ast.literal_eval(node.value))
    return {}


def is_bare(path: Path) -> bool:
    """Return whether this is an `__init__.py` without code, which every module of its package brings along."""
    if path.name != "__init__.py":
        return False
    return not exports(path) and not imports_of(path) and "__path__" not in path.read_text()


def is_test(path: Path) -> bool:
    """Return whether pytest runs a file."""
    return path.name.endswith("_test.py")


def source_root(package: str) -> Path:
    """Return the folder of a Bazel package's Python files."""
    return Path(package) if package.startswith("apps/") else Path(package) / Path(package).name


def target_of(path: Path, root: Path) -> str:
    """Return the name of a file's own target: its path, or its folder's for `__init__.py`."""
    if path.name != "__init__.py":
        return str(path.relative_to(root).with_suffix(""))
    return str(path.parent.relative_to(root)) if path.parent != root else root.name


def label_of(package: str, dep: str) -> str:
    """Return the label of an entry of a package's deps; a requirement() call is its own."""
    text = dep.strip('"')
    return whole(package, text[1:]) if text.startswith(":") else text


def whole(package: str, target: str) -> str:
    """Return the label of a target as other packages write it."""
    return f"//{package}" if target == Path(package).name else f"//{package}:{target}"


class Tree:
    """The BUILD files and Python files of libraries and apps: which rule has which file, and what it needs."""

    def __init__(self) -> None:
        self.packages = [
            str(path.parent)
            for path in sorted([*Path("libs").glob("*/BUILD.bazel"), *Path("apps").glob("*/BUILD.bazel")])
        ]
        self.builds: dict[str, Build] = {}
        self.rules: dict[str, list[Rule]] = {}
        self.sources: dict[str, Path] = {}  # by the dotted names they are imported under
        self.labels: dict[Path, tuple[str, str]] = {}  # (Bazel package, target)
        self.modules: dict[Path, str] = {}  # the targets of files that others import
        self.arrows: dict[tuple[str, str], str] = {}  # (label, label that it needs): for which import
        self.brought: dict[str, frozenset[str]] = {}
        for package in self.packages:
            root = source_root(package)
            base = Path() if package.startswith("apps/") else Path(package)
            for path in sorted(root.rglob("*.py")):
                self.sources[".".join(path.relative_to(base).with_suffix("").parts).removesuffix(".__init__")] = path
            self.builds[package] = parse_build((Path(package) / "BUILD.bazel").read_text())
            self.rules[package] = assign(package, self.builds[package].rules)
            for rule in self.rules[package]:
                for path in rule.files:
                    name = target_of(path, source_root(package)) if rule.is_apart else rule.name
                    self.labels.setdefault(path, (package, name))
                if rule.kind in ("module", "python_package"):
                    self.modules |= dict.fromkeys(rule.files, rule.name)
        for package in self.packages:
            for rule in self.rules[package]:
                rule.deps = self.dependencies(package, rule)
        self.needs = needs_by_label(self.arrows)
        for package in self.packages:
            for rule in self.rules[package]:
                rule.deps = self.needed_alone(package, rule)

    def resolve(self, module: str, name: str) -> str | None:
        """Return the dotted name of the file that an import needs; None for one of other people's packages."""
        if f"{module}.{name}" in self.sources:
            return f"{module}.{name}"
        if module not in self.sources:
            return None
        lazy = exports(self.sources[module]) if self.sources[module].name == "__init__.py" else {}
        return (self.resolve(lazy[name], name) or lazy[name]) if name in lazy else module

    def dependencies(self, package: str, rule: Rule) -> list[str]:
        """Return labels and requirement() calls for the files of a rule; record the import that needs each label."""
        own = whole(package, rule.name)
        labels: set[str] = set()
        if rule.kind == "app" and self.modules.get(rule.files[0], rule.name) != rule.name:
            return [f'":{self.modules[rule.files[0]]}"']  # a program of a file that has a target for others
        for path in rule.files:
            pages = [Path(package) / "README.md"] if '"README.md"' in rule.attributes.get("data", "") else []
            for module, name in sorted(wanted_by(path, pages)):
                dotted = self.resolve(module, name)
                if dotted is None:
                    needs = {dep: dep for dep in requirements(module, rule.hub, is_test(path))}
                elif self.sources[dotted] in self.labels and not is_bare(self.sources[dotted]):
                    owner, target = self.labels[self.sources[dotted]]
                    needs = {f'":{target}"' if owner == package else f'"{whole(owner, target)}"': whole(owner, target)}
                else:
                    continue
                for dep, label in needs.items():
                    if label != own:
                        labels.add(dep)
                        self.arrows.setdefault((own, label), f"{path} imports {dotted or module}")
        for kept in rule.kept:
            label = label_of(package, kept)
            if label != own:
                self.arrows.setdefault((own, label), f"{Path(package) / 'BUILD.bazel'} keeps {label}")
        return sorted(labels, key=order)

    def needed_alone(self, package: str, rule: Rule) -> list[str]:
        """Return the deps of a rule without what the macro adds, and those that another of them brings along."""
        labels = {dep: label_of(package, dep) for dep in rule.deps}
        subject = self.subject(package, rule)
        brought = {need for label in [*labels.values(), *subject] for need in self.brought_by(label)} | subject
        return [dep for dep in rule.deps if labels[dep] not in brought]

    def subject(self, package: str, rule: Rule) -> set[str]:
        """Return the target that a test is of, which defs.bzl gives it: its own name without `_test`."""
        name = rule.name.removesuffix("_test")
        if rule.kind not in ("module_test", "package_test") or name == Path(package).name:
            return set()
        targets = [one.name for one in self.rules[package] if one.kind in ("module", "python_package")]
        return {whole(package, name)} if name != rule.name and name in targets else set()

    def brought_by(self, label: str) -> frozenset[str]:
        """Return what a target needs, directly or by other targets."""
        if label not in self.brought:
            self.brought[label] = frozenset()  # in a circle, which `complaints` tells, it ends here
            needs = self.needs.get(label, [])
            self.brought[label] = frozenset(needs).union(*(self.brought_by(need) for need in needs))
        return self.brought[label]

    def text(self, package: str) -> str:
        """Return the text that a BUILD file should have."""
        return written(self.builds[package], self.rules[package])

    def complaints(self) -> list[str]:
        """Return what BUILD files cannot express: targets of one name, folders that need each other, packages for
        few."""
        said = []
        for package, rules in self.rules.items():
            root = source_root(package)
            names = [rule.name for rule in rules if rule.kind != "module_tests"]
            names += [target_of(path, root) for rule in rules if rule.kind == "module_tests" for path in rule.files]
            names += [f"{folder}_test" for rule in rules for folder in rule.folders]
            twice = sorted({name for name in names if names.count(name) > 1})
            said += [f"//{package} has two targets named {name}: rename a file or a folder" for name in twice]
            for rule in (rule for rule in rules if rule.kind == "python_package"):
                said += [
                    f"{why}, of @pypi_extras, which all that need its folder would need: give it a target of its own, "
                    f'module(name = "{rule.name}/{Path(why.split()[0]).stem}")'
                    for dep in rule.deps
                    if "pypi_extras" in dep and (why := self.arrows[whole(package, rule.name), dep])
                ]
        return said + [circle(path, self.arrows) for path in circles(self.needs)]


def wanted_by(path: Path, pages: Iterable[Path]) -> set[tuple[str, str]]:
    """Return the imports of a file, of the modules that a lazy facade exports, and of the pages whose code it runs."""
    wanted = set(imports_of(path))
    if path.name == "__init__.py":
        wanted |= {(module, "") for module in exports(path).values()}
    for page in pages:
        for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S):
            wanted |= imports(ast.parse(block))
    return wanted


def requirements(module: str, hub: str, for_test: bool) -> set[str]:
    """Return the requirement() call for a third-party module; none for one that no lock has."""
    distribution = normal(DISTRIBUTIONS.get(module.split(".")[0], module.split(".")[0]))
    if hub == "pypi" and distribution not in locked(hub) and distribution in locked("pypi_extras"):
        return {f'requirement("{distribution}", "pypi_extras")'}
    if distribution in locked(hub) and not (distribution == "pytest" and for_test):
        return {f'requirement("{distribution}"' + ("" if hub == "pypi" else f', "{hub}"') + ")"}
    return set()


def assign(package: str, rules: list[Rule]) -> list[Rule]:
    """Return the rules of a package in the order in which they are written, each with its files.

    Rules that name a file are kept as long as there is one; those of the top folder's modules and of all folders are
    made where there are none.
    """
    folder, root = Path(package), source_root(package)
    known = {(rule.kind, rule.name): rule for rule in rules}
    top = [rule for rule in rules if rule.kind == "library"]
    programs = [rule for rule in rules if rule.kind == "app"]
    singles = [rule for rule in rules if rule.kind in FILE_RULES]
    for rule in [*singles, *programs]:
        paths = [folder / source for source in rule.sources] or [root / f"{rule.name}.py"]
        rule.files = [path for path in paths if path.exists() and path.name != "__init__.py"]
        if rule.kind == "module_tests":
            rule.attributes["srcs"] = spelled(sorted(str(path.relative_to(folder)) for path in rule.files))
    singles = [rule for rule in singles if rule.files]
    for rule in top:
        rule.files = [root / "__init__.py"]
    # A rule of the file's name stands for it; further ones may run it again (another hub, other attributes).
    own = {rule.files[0] for rule in [*singles, *programs] if rule.name == name_of(rule.files, root)}
    own |= {path for rule in singles if rule.kind == "module_tests" for path in rule.files}
    for path in sorted(root.glob("*.py")):
        if path not in own and not is_test(path) and path.name != "__init__.py":
            singles.append(Rule("module", target_of(path, root), files=[path]))
            own.add(path)
    made = [*singles]
    hosts = {folder: rule for rule in rules if rule.kind == "package_test" for folder in rule.folders}
    for place in sorted({path.parent for path in root.rglob("*.py")}):
        name = str(place.relative_to(root)) if place != root else root.name
        inside = sorted(place.glob("*.py"))
        modules = [path for path in inside if not is_test(path) and path not in own] if place != root else []
        tests = [path for path in inside if is_test(path) and path not in own]
        for kind, target, files in [("python_package", name, modules), ("package_test", f"{name}_test", tests)]:
            if any(not is_bare(path) for path in files):
                rule = known.get((kind, target)) or Rule(kind, target)
                rule = hosts.get(name, rule) if kind == "package_test" else rule
                left_out = [path.name for path in inside if path in own and not is_test(path)]
                rule.attributes.pop("exclude", None)
                if left_out and kind == "python_package":  # of tests defs.bzl sees it: their own rules come first
                    rule.attributes["exclude"] = spelled(left_out)
                if not rule.files:
                    made.append(rule)
                rule.files += files
    made.sort(key=lambda rule: (re.sub(r"(_gpu\d?|_tf\d+)?_test$", "~", rule.name), rule.name))
    made.sort(key=lambda rule: (rule.kind != "module_tests") + (rule.name == f"{root.name}_test" or bool(rule.folders)))
    return [*top, *made, *programs]


def name_of(files: list[Path], root: Path) -> str:
    """Return the name of a file's own target; "" for a file outside of the root (a benchmark)."""
    return target_of(files[0], root) if files and files[0].is_relative_to(root) else ""


def needs_by_label(arrows: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the labels that each label needs."""
    needs: dict[str, list[str]] = {}
    for label, need in sorted(arrows):
        needs.setdefault(label, []).append(need)
    return needs


def circles(needs: dict[str, list[str]]) -> Iterator[list[str]]:
    """Yield the shortest circle, of targets that need each other, through each target that is in one."""
    seen: set[str] = set()
    told: set[frozenset[str]] = set()
    for start in sorted(needs):
        before: dict[str, str] = {}
        todo = [start]
        while todo and start not in before:
            here = todo.pop(0)
            for need in needs.get(here, ()):
                if need not in before and need not in seen:
                    before[need] = here
                    todo.append(need)
        if start in before:
            path = [start]
            while before[path[0]] != start:
                path.insert(0, before[path[0]])
            if frozenset(path) not in told:
                told.add(frozenset(path))
                yield path
        else:
            seen.add(start)  # in no circle: nobody has to come by here again


def circle(path: list[str], arrows: dict[tuple[str, str], str]) -> str:
    """Return a text: which targets need each other, and by which imports."""
    said = [arrows[pair] for pair in zip(path, [*path[1:], path[0]], strict=True)]
    return f"{' and '.join(path)} need each other: " + "; ".join(said)


def main() -> int:
    """Write, or with --check compare, every BUILD file of the libraries and apps."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only say which files are out of date")
    arguments = parser.parse_args()
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    tree = Tree()
    complaints = tree.complaints()
    if complaints:
        print("\n".join(complaints))
        return 1
    stale = 0
    for package in tree.packages:
        build = Path(package) / "BUILD.bazel"
        text = tree.text(package)
        if text != build.read_text():
            stale += 1
            print(f"{build}: {'is out of date: ./bazelw run //build:gazelle' if arguments.check else 'written'}")
            if not arguments.check:
                build.write_text(text)
    return int(arguments.check and stale > 0)


if __name__ == "__main__":
    sys.exit(main())
