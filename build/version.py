"""One version for all libraries and the apps: `./bazelw run //build:version` compares, `-- X.Y.Z` writes it everywhere.

It stands in version.bzl, where Bazel names the wheels by it, in the `__version__` of each library and of the apps, from
which their wheels have it, and in the pins by which they ask for one another. CHANGELOG.md has a section for it.
"""

import os
import re
import sys
from pathlib import Path

RELEASE = re.compile(r"\d+\.\d+\.\d+((a|b|rc)\d+)?")
PLACES = {
    "build/version.bzl": re.compile(r'^VERSION = "(.*)"$', re.M),
    "libs/*/*/__init__.py": re.compile(r'^__version__ = "(.*)"$', re.M),
    "apps/__init__.py": re.compile(r'^__version__ = "(.*)"$', re.M),
    "libs/*/pyproject.toml": re.compile(r'"tessera-[a-z-]+==([^"]*)"'),
    "apps/pyproject.toml": re.compile(r'"tessera-[a-z-]+(?:\[[a-z,]+\])?==([^"]*)"'),
    "CHANGELOG.md": re.compile(r"^## (\d\S*)", re.M),
}


def facades(root: Path) -> list[Path]:
    """Return the `__init__.py` of each library and of the apps."""
    libraries = [path for path in root.glob("libs/*/*/__init__.py") if path.parent.name == path.parent.parent.name]
    return sorted([*libraries, *root.glob("apps/__init__.py")])


def files(root: Path, pattern: str) -> list[Path]:
    """Return the files of one of PLACES."""
    names = facades(root) if pattern.endswith("__init__.py") else root.glob(pattern)
    return sorted(path for path in names if path.relative_to(root).match(pattern))


def found(root: Path) -> dict[str, list[str]]:
    """Return the versions that each file names; of the change log, the newest."""
    versions = {}
    for pattern, place in PLACES.items():
        for path in files(root, pattern):
            named = place.findall(path.read_text())
            versions[str(path.relative_to(root))] = named[:1] if pattern == "CHANGELOG.md" else named
    return versions


def complaints(root: Path) -> list[str]:
    """Return complaints about versions that differ from version.bzl."""
    versions = found(root)
    (version,) = versions["build/version.bzl"]
    wrong = [f"{name}: {', '.join(named)}, not {version}" for name, named in versions.items() if set(named) - {version}]
    needed = [*(str(path.relative_to(root)) for path in facades(root)), "CHANGELOG.md"]
    return wrong + [f"{name}: names no version" for name in needed if not versions[name]]


def write(root: Path, version: str) -> None:
    """Write a version everywhere but in the change log, which needs a text. ValueError for another form."""
    if not RELEASE.fullmatch(version):
        raise ValueError(f"{version!r} is no version: write X.Y.Z, or X.Y.Zrc1 (a, b, rc) before a release")
    for pattern, place in PLACES.items():
        for path in files(root, pattern) if pattern != "CHANGELOG.md" else ():
            text = path.read_text()
            path.write_text(place.sub(lambda match: match[0].replace(match[1], version), text))


def main(arguments: list[str]) -> int:
    """Compare the versions, or write and compare them."""
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    if arguments:
        write(root, arguments[0])
    wrong = complaints(root)
    print("\n".join(wrong) or f"every library is {found(root)['build/version.bzl'][0]}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
