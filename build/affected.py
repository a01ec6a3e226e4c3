"""Print which tests a change reruns: `./bazelw run //build:affected` (what git sees as changed), or `-- FILE...`.

A test runs again where one of the files is among what it needs, directly or not, by the rules as Bazel reads them; no
package is installed for it. `--base REV` compares with a revision instead of the last commit; `--list` prints the
tests. Without a file, or with `--each`, the tests are counted for each changed file.

A BUILD file counts for all of its package. What every target is made by (a .bzl file, a lock, the workspace, an option
of Bazel) may rerun everything: which tests do, only a run tells. A deleted file counts by the rule that names it still,
or by the package that it was in.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Collection
from pathlib import Path

FOR_ALL = frozenset(
    [
        "WORKSPACE",
        "WORKSPACE.bazel",
        "MODULE.bazel",
        ".bazelrc",
        ".bazelignore",
        ".bazeliskrc",
        "bazelw",
        "build/install_hub.py",
    ]
)


def output(command: list[str]) -> str:
    """Run a command and return its output; exit with that where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def changed(base: str) -> list[tuple[str, bool]]:
    """Return (file, whether it was deleted) of files that differ from a revision, untracked ones included."""
    fields = output(["git", "diff", "--name-status", "--no-renames", "-z", base]).split("\0")[:-1]
    new = output(["git", "ls-files", "--others", "--exclude-standard", "-z"]).split("\0")[:-1]
    known = [(name, status == "D") for status, name in zip(fields[::2], fields[1::2], strict=True)]
    return [*known, *((name, False) for name in new)]


def inside(root: Path, file: Path, deleted: Collection[str] = ()) -> str:
    """Return the name of a file under the root. Exit where there is none: "no test depends on it" would mislead."""
    path = file.resolve()
    if path.is_relative_to(root) and path.relative_to(root).as_posix() in deleted:
        return path.relative_to(root).as_posix()
    if not path.is_file() or not path.is_relative_to(root):
        sys.exit(f"{file}: no such file under {root}")
    return path.relative_to(root).as_posix()


def label(file: str, packages: set[str]) -> str | None:
    """Return a source file's label, in the nearest folder above with a BUILD file; None where there is none."""
    for folder in [parent.as_posix() for parent in Path(file).parents]:
        folder = "" if folder == "." else folder
        if folder in packages:
            return f"//{folder}:{file[len(folder) + 1 :] if folder else file}"
    return None


def build_packages(deleted: Collection[str]) -> set[str]:
    """Return the folders with a BUILD file, now or before it was deleted."""
    files = output(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*BUILD.bazel"]).splitlines()
    files += [name for name in deleted if Path(name).name == "BUILD.bazel"]
    return {"" if (folder := Path(name).parent.as_posix()) == "." else folder for name in files}


class Graph:
    """The rules of the tree: who needs a label, and which rules are tests."""

    def __init__(self, xml: str) -> None:
        self.needed_by: dict[str, set[str]] = defaultdict(set)
        self.tests: set[str] = set()
        self.rules: set[str] = set()
        for rule in ET.fromstring(xml).iter("rule"):
            name = rule.attrib["name"]
            self.rules.add(name)
            if rule.attrib["class"].endswith("_test"):
                self.tests.add(name)
            for need in rule.iter("rule-input"):
                self.needed_by[need.attrib["name"]].add(name)

    def affected(self, labels: list[str]) -> set[str]:
        """Return the tests that need one of these labels, directly or not."""
        seen, todo = set(labels), list(labels)
        while todo:
            new = self.needed_by.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen & self.tests

    def of_package(self, package: str) -> list[str]:
        """Return the labels in a package that a rule has or needs."""
        return [name for name in self.rules | set(self.needed_by) if name.startswith(f"//{package}:")]


def is_for_all(file: str) -> bool:
    """Return whether a file affects all targets: rules, locks, their readers, workspace, Bazel's options, version."""
    path = Path(file)
    in_third_party = path.parts[0] == "third_party" and path.suffix != ".md"
    return path.suffix in (".bzl", ".bazelrc") or file in FOR_ALL or file.startswith("build/locks/") or in_third_party


def rerun(graph: Graph, file: str, packages: set[str], deleted: bool = False) -> tuple[set[str], bool]:
    """Return the tests that a changed file reruns, and whether these are all tests because nothing narrower is known.

    `packages`: the folders with a BUILD file, those that are deleted included.
    """
    if is_for_all(file):
        return graph.tests, True
    if Path(file).name in ("BUILD", "BUILD.bazel"):
        folder = Path(file).parent.as_posix()
        affected = graph.affected(graph.of_package("" if folder == "." else folder))
        return (affected, False) if affected else (graph.tests, True)
    name = label(file, packages)
    if name is None:
        return set(), False
    gone = deleted and name not in graph.needed_by  # a glob had it, or the BUILD file is changed with it
    return graph.affected(graph.of_package(name[2:].partition(":")[0]) if gone else [name]), False


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*")
    parser.add_argument("--base", default="HEAD")
    parser.add_argument("--each", action="store_true", help="count for each file as well")
    parser.add_argument("--list", action="store_true", help="print the tests")
    args = parser.parse_args()
    here = Path(os.environ.get("BUILD_WORKING_DIRECTORY", "."))
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", ".")).resolve()
    os.chdir(root)
    since = changed(args.base)
    deleted = {name for name, gone in since if gone}
    files = [inside(root, here / name, deleted) for name in args.files] or [name for name, _ in since]
    graph = Graph(output(["./bazelw", "query", "--noshow_progress", "--output=xml", "//..."]))
    packages = build_packages(deleted)
    tests: set[str] = set()
    for file in files:
        rerun_tests, for_all = rerun(graph, file, packages, file in deleted)
        tests |= rerun_tests
        if args.each or not args.files or for_all:
            print(f"{len(rerun_tests):5d}  {file}{' (may rerun everything)' if for_all else ''}")
    if args.list:
        print("\n".join(sorted(tests)))
    named = ", ".join(files) if len(files) < 4 else f"{len(files)} files"
    print(f"{len(tests)} of {len(graph.tests)} tests depend on {named}")


if __name__ == "__main__":
    main()
