"""Says which tests a change reruns: `./bazelw run //build:affected` (what git sees as changed), or `-- FILE...`.

A test runs again where one of the files is among what it needs, directly or not, by the rules as Bazel reads them; no
package is installed for it. `--base REV` compares with a revision instead of the last commit; `--list` prints the
tests. Without a file, or with `--each`, the tests are counted for each changed file.
"""

import argparse
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections import defaultdict
from pathlib import Path


def output(command: list[str]) -> str:
    """Run a command; what it prints. Ends with what it says where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr.strip()}")
    return done.stdout


def changed(base: str) -> list[str]:
    """Files that differ from a revision, with those that git does not know yet."""
    known = output(["git", "diff", "--name-only", "--diff-filter=d", base])
    return [*known.splitlines(), *output(["git", "ls-files", "--others", "--exclude-standard"]).splitlines()]


def inside(root: Path, file: Path) -> str:
    """The name of a file under the root. SystemExit: there is none, and "no test depends on it" would mislead."""
    found = file.resolve()
    if not found.is_file() or not found.is_relative_to(root):
        sys.exit(f"{file}: no such file under {root}")
    return found.relative_to(root).as_posix()


def label(file: str, packages: set[str]) -> str | None:
    """The label of a source file: the nearest folder above it with a BUILD file is its package; None without one."""
    for folder in [parent.as_posix() for parent in Path(file).parents]:
        folder = "" if folder == "." else folder
        if folder in packages:
            return f"//{folder}:{file[len(folder) + 1 :] if folder else file}"
    return None


def build_packages() -> set[str]:
    """The folders with a BUILD file."""
    files = output(["git", "ls-files", "--cached", "--others", "--exclude-standard", "*BUILD.bazel"])
    return {"" if (folder := Path(name).parent.as_posix()) == "." else folder for name in files.splitlines()}


class Graph:
    """The rules of the tree: who needs a label, and which rules are tests."""

    def __init__(self, xml: str) -> None:
        self.needed_by: dict[str, set[str]] = defaultdict(set)
        self.tests: set[str] = set()
        for rule in ET.fromstring(xml).iter("rule"):
            name = rule.attrib["name"]
            if rule.attrib["class"].endswith("_test"):
                self.tests.add(name)
            for need in rule.iter("rule-input"):
                self.needed_by[need.attrib["name"]].add(name)

    def affected(self, labels: list[str]) -> set[str]:
        """The tests that need one of these labels, directly or not."""
        seen, todo = set(labels), list(labels)
        while todo:
            new = self.needed_by.get(todo.pop(), set()) - seen
            seen |= new
            todo += new
        return seen & self.tests


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
    files = [inside(root, here / name) for name in args.files] or changed(args.base)
    packages = build_packages()
    labels = {file: found for file in files if (found := label(file, packages))}
    graph = Graph(output(["./bazelw", "query", "--noshow_progress", "--output=xml", "//..."]))
    if args.each or not args.files:
        for file, found in labels.items():
            print(f"{len(graph.affected([found])):5d}  {file}")
    tests = graph.affected(list(labels.values()))
    if args.list:
        print("\n".join(sorted(tests)))
    named = ", ".join(labels) if len(labels) < 4 else f"{len(labels)} files"
    print(f"{len(tests)} of {len(graph.tests)} tests depend on {named}")


if __name__ == "__main__":
    main()
