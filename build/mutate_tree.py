"""The copy of a library (or of the apps) in which mutmut works: what is mutated, by which tests, with which settings.

mutmut wants a folder whose packages are imported by the names of their paths. A library's folder is one (libs/NAME
holds the package NAME), and so is the top of the tree for the apps; such a folder is a *group* here.
"""

import ast
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PRAGMA = "# pragma: no mutate"
IGNORED = shutil.ignore_patterns("__pycache__", ".*", "mutants", "*.pyc")
# Calls whose arguments are texts for people: refusals of a capability, warnings.
TEXT_CALLS = frozenset({"No", "warn"})
# Folders whose code only tests and benchmarks run.
NOT_SHIPPED = frozenset({"testing", "benchmarks"})
# What a test says it wants that is not here.
TAGS = frozenset({"gpu", "gpu2", "gpu4", "npu", "vllm", "slow", "browser", "nodes", "manual"})

# The examples of each run are the same, and slowness is no failure: what fails, fails because of the mutant. Quick
# tests come first, file by file, so that what a file sets up is set up once: most mutants fail one of them.
CONFTEST = """
import json
from collections import Counter
from pathlib import Path

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass
else:
    slow = [HealthCheck.too_slow]
    settings.register_profile("mutate", derandomize=True, deadline=None, database=None, suppress_health_check=slow)
    settings.load_profile("mutate")


def pytest_collection_modifyitems(items):
    stats = Path("mutmut-stats.json")
    seconds = json.loads(stats.read_text())["duration_by_test"] if stats.exists() else {}
    files = Counter()
    for item in items:
        files[str(item.path)] += seconds.get(item.nodeid, 0.0)
    items.sort(key=lambda item: (files[str(item.path)], str(item.path), seconds.get(item.nodeid, 0.0)))
"""


@dataclass(frozen=True)
class Group:
    """The files of one library or of the apps that are mutated; paths are those of the tree.

    `root`: the folder that mutmut works in a copy of. `package`: the folder in it that holds the Python files.
    """

    root: Path
    package: str
    files: tuple[Path, ...]
    tests: tuple[Path, ...]


def is_mutable(path: Path) -> bool:
    """Return whether a file of the tree is code that users run: no test, facade, or helper of tests."""
    parts = path.parts
    return (
        path.suffix == ".py"
        and (parts[0] == "apps" or (parts[0] == "libs" and len(parts) > 3 and parts[1] == parts[2]))
        and not path.name.endswith("_test.py")
        and not path.stem.startswith("testing")
        and path.name != "__init__.py"
        and not NOT_SHIPPED & set(parts)
    )


def files_of(top: Path, wanted: Iterable[str]) -> list[Path]:
    """Return the paths from `top` of the files that files and folders name; ValueError for a name without any."""
    unique: dict[Path, None] = {}
    for name in wanted:
        path = (top / name).resolve().relative_to(top.resolve())
        inside = sorted((top / path).rglob("*.py")) if (top / path).is_dir() else [top / path]
        files = [file.relative_to(top) for file in inside if file.is_file() and is_mutable(file.relative_to(top))]
        if not files:
            raise ValueError(f"{name} has no code to mutate: name files or folders below libs/NAME/NAME or apps")
        unique |= dict.fromkeys(files)
    return list(unique)


def tests_beside(top: Path, file: Path) -> list[Path]:
    """Return the tests in a file's folder, from `top`: its own and those of its neighbours, but for tagged ones."""
    folder = (top / file).parent
    return sorted(path.relative_to(top) for path in {*folder.glob("*_test.py")} - tagged_tests(folder))


def tagged_tests(folder: Path) -> set[Path]:
    """Return the tests that, by the BUILD file over `folder`, need more than a CPU, time or the main packages."""
    build = next((path / "BUILD.bazel" for path in (folder, *folder.parents) if (path / "BUILD.bazel").is_file()), None)
    tagged: set[Path] = set()
    for node in ast.walk(ast.parse(build.read_text(encoding="utf-8"))) if build else ():
        words = {word.arg: word.value for word in node.keywords} if isinstance(node, ast.Call) else {}
        if build and {"name", "tags"} <= words.keys() and TAGS & set(ast.literal_eval(words["tags"])):
            roots = (build.parent, build.parent / build.parent.name)  # an app's files; a library's
            tagged |= {root / f"{ast.literal_eval(words['name'])}.py" for root in roots}
            tagged |= {build.parent / source for source in ast.literal_eval(words.get("srcs", ast.List([])))}
    return tagged


def groups_of(top: Path, files: Sequence[Path], tests: Sequence[Path], beside: bool = True) -> list[Group]:
    """Return files by library, each group with the tests beside its files and those of `tests`."""
    by_root: dict[tuple[Path, str], list[Path]] = {}
    for file in files:
        key = (Path(), "apps") if file.parts[0] == "apps" else (Path(*file.parts[:2]), file.parts[2])
        by_root.setdefault(key, []).append(file)
    groups = []
    for (root, package), own in by_root.items():
        near = [test for file in own for test in tests_beside(top, file)] if beside else []
        chosen = tuple(dict.fromkeys([*near, *tests]))
        if not chosen:
            raise ValueError(f"no test lies beside {', '.join(map(str, own))}: name some with --tests")
        groups.append(Group(root, package, tuple(own), chosen))
    return groups


def copy_group(top: Path, group: Group, place: Path, cold: bool) -> list[str]:
    """Copy the package and the tests elsewhere to `place`, with settings; return the tests by their paths there."""
    shutil.copytree(top / group.root / group.package, place / group.package, ignore=IGNORED)
    for page in [*(top / group.root).glob("*.md"), *(top / group.root).glob("BUILD.bazel")]:  # what some tests read
        shutil.copy(page, place)
    for file in group.files:
        copied = place / file.relative_to(group.root)
        copied.write_text(without_texts(copied.read_text(encoding="utf-8")), encoding="utf-8")
    selected = []
    for test in group.tests:
        if test.is_relative_to(group.root / group.package):
            selected.append(str(test.relative_to(group.root)))
            continue
        (place / "elsewhere").mkdir(exist_ok=True)
        name = "_".join(test.parts)
        shutil.copy(top / test, place / "elsewhere" / name)
        selected.append(f"elsewhere/{name}")
    (place / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    mutated = [str(file.relative_to(group.root)) for file in group.files]
    pages = sorted(path.name for path in place.glob("*.md"))
    (place / "pyproject.toml").write_text(settings(group.package, mutated, selected, pages, cold), encoding="utf-8")
    return selected


def settings(package: str, files: Sequence[str], tests: Sequence[str], pages: Sequence[str], cold: bool) -> str:
    """Return the pyproject.toml of the copy: mutmut's settings, and pytest's as in the tree."""
    values: Mapping[str, object] = {
        "source_paths": [package],
        "only_mutate": list(files),
        "pytest_add_cli_args_test_selection": list(tests),
        "also_copy": ["conftest.py", "elsewhere", *pages],
        "track_dependencies": False,
        "use_git_change_detection": False,
        "process_isolation": "forkserver" if cold else "fork",
    }
    lines = [f"{key} = {str(value).lower() if isinstance(value, bool) else value!r}" for key, value in values.items()]
    lines.append('pytest_add_cli_args = ["--import-mode=importlib", "-p", "no:cacheprovider"]')
    markers = sorted(TAGS - {"manual"})
    return "\n".join(
        [
            "[tool.mutmut]",
            *lines,
            "",
            "[tool.pytest.ini_options]",
            'python_files = ["*_test.py"]',
            f"markers = {markers}",
        ]
    )


def without_texts(source: str) -> str:
    """Return the source with a pragma on each line of an error's text: tests need not find a changed message.

    Marked are the lines of `raise` statements and of calls in `TEXT_CALLS`, but for their first line where more than
    the call stands on it. Lines that cannot take a comment (inside of a text of several lines) stay as they are.
    """
    lines = source.splitlines()
    for number in sorted(set(_text_lines(ast.parse(source)))):
        changed = [*lines]
        changed[number - 1] += f"  {PRAGMA}"
        if _same("\n".join(changed), source):
            lines = changed
    return "\n".join(lines) + "\n"


def _text_lines(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        called = node.func if isinstance(node, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
        if isinstance(node, ast.Raise) or name in TEXT_CALLS:
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def _same(changed: str, source: str) -> bool:
    try:
        return ast.dump(ast.parse(changed)) == ast.dump(ast.parse(source))
    except SyntaxError:
        return False
