"""Checks of the tree as a whole: `./bazelw run //build:check_tree`.

Tracked files must not hold a registry's host, a path of somebody's machine, trailing blanks or names beyond ASCII; each
Python file is in a Bazel target, each test file in a test target; the arrows between the libraries hold for every
target of a folder, tests included; READMEs fit a screen, paragraphs are short, pages have no dates and are linked,
links lead somewhere and the front page's numbers are the tree's (readmes.py); layout, imports, words and docstrings
follow the rules (house.py); measured figures of pages are those of docs/benchmarks (docs/figures.py).
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from figures import check_figures
from house import check_house
from public_words import check_public_words, public_names, read_exceptions, read_field
from readmes import CHECKS, check_numbers, check_peers

# Spelled so that this file does not hold them itself.
FORBIDDEN = {
    "a registry's host": re.compile(
        r"(pypi\.org|pythonhosted\.org|files\.python|download\.py[t]orch\.org|registry\.npmjs)"
    ),
    "a path of a machine": re.compile(
        r"(?<![\w.$}/-])/(work|root|home/\w+|tmp/tv|Users/\w+|opt/pypi|opt/wheels)(/|\b)"
    ),
}
SOURCES = ("libs/", "apps/", "build/")
NEVER = [("engines", "rollout"), ("rollout", "engines")]
LIBRARIES = ["seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "runlog", "runplan", "schedules"]


def tracked() -> list[str]:
    """Return the paths of the tracked files that exist."""
    out = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return [name for name in out.split("\0") if name and Path(name).is_file()]


def query(expression: str) -> set[str]:
    """Return the labels of a bazel query, as paths where they are files."""
    command = ["./bazelw", "query", "--keep_going", "--output=label", expression]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):
        sys.exit(f"bazel query {expression}:\n{done.stderr}")
    return {line.removeprefix("//").replace(":", "/").lstrip("/") for line in done.stdout.split()}


def check_text(names: list[str]) -> list[str]:
    """Return complaints about the files' names and lines."""
    complaints = [f"{name}: the name is not ASCII" for name in names if not name.isascii()]
    for name in names:
        if name == "build/check_tree.py":
            continue
        try:
            lines = Path(name).read_text().splitlines()
        except UnicodeDecodeError:
            continue  # a picture
        for number, line in enumerate(lines, 1):
            if line != line.rstrip():
                complaints.append(f"{name}:{number}: trailing blanks")
            complaints += [f"{name}:{number}: {what}" for what, pattern in FORBIDDEN.items() if pattern.search(line)]
    return complaints


def check_targets(names: list[str]) -> list[str]:
    """Return complaints about Python files that are in no Bazel target."""
    mine = [name for name in names if name.endswith(".py") and name.startswith(SOURCES)]
    in_rules = query("labels(srcs, //...) + labels(main, //...) + kind('source file', labels(data, //...))")
    in_tests = query("labels(srcs, kind(py_test, //...))")
    complaints = [f"{name}: in no Bazel target" for name in mine if name not in in_rules]
    return complaints + [f"{n}: in no test target" for n in mine if n.endswith("_test.py") and n not in in_tests]


def check_arrows() -> list[str]:
    """Return complaints about forbidden dependencies of libraries' targets, tests included."""
    present = [name for name in LIBRARIES if Path("libs", name, "BUILD.bazel").exists()]
    pairs = [(a, b) for a, b in NEVER if a in present and b in present]
    pairs += [(a, b) for a in present for b in present if a != b and "runlog" in (a, b)]
    complaints = []
    for above, below in pairs:
        labels = query(f"deps(//libs/{above}/...) intersect //libs/{below}/...")
        complaints += [f"a target of {above} depends on {label}" for label in sorted(labels)]
    for name in present:
        labels = query(f"deps(//libs/{name}/...) intersect //apps/...")
        complaints += [f"a target of {name} depends on {label}" for label in sorted(labels)]
    return complaints


def main() -> int:
    """Print every complaint; return 1 if there is one."""
    os.chdir(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    names = tracked()
    complaints = check_text(names) + check_targets(names) + check_arrows()
    complaints += [fault for check in CHECKS for fault in check(Path())]
    sources = {name: Path(name).read_text() for name in names if name.endswith(".py")}
    front = Path("README.md").read_text()
    complaints += check_house(sources) + check_numbers(front, sources)
    complaints += check_figures(Path())
    complaints += check_peers(front, json.loads(Path("docs/peers.json").read_text()))
    complaints += check_public_words(public_names(sources), read_field(), read_exceptions())
    print("\n".join(complaints))
    print(f"{len(names)} tracked files, {len(complaints)} complaints")
    return int(bool(complaints))


if __name__ == "__main__":
    sys.exit(main())
