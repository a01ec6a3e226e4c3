"""Build the wheel or the sdist of a library from a list of files: the action of dist.bzl.

hatchling builds, from copies and with one time for all files, so that the same files give the same bytes.
"""

import argparse
import os
import re
import shutil
import tempfile
from pathlib import Path

from hatchling.build import build_sdist, build_wheel

EPOCH = "1577836800"  # 2020-01-01; a zip file knows no time before 1980
PAGES = {"Homepage": "README.md", "Documentation": "docs/architecture.md", "Changelog": "CHANGELOG.md"}


def stage(files: list[Path], root: Path, folder: Path) -> None:
    """Copy files below `root` to the same places below `folder`, and any other file to its top."""
    for file in files:
        goal = folder / (file.relative_to(root) if file.is_relative_to(root) else file.name)
        goal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, goal)


def name_home(metadata: Path, home: str) -> None:
    """Add the pages of the tree at `home` to a pyproject.toml; they become Project-URL lines of wheel and sdist."""
    if not re.fullmatch(r"https://[^\s\"]*[^\s\"/]", home):
        raise SystemExit(f"HOME of build/version.bzl is {home!r}: write https://..., without a slash at the end")
    lines = [f'{label} = "{home}/{page}"' for label, page in PAGES.items()]
    metadata.write_text("\n".join([metadata.read_text(), "[project.urls]", *lines, ""]))


def build(kind: str, files: list[Path], root: Path, folder: Path, home: str = "") -> Path:
    """Build a "wheel" or an "sdist" in a new folder and return its path, whose name its metadata sets."""
    stage([file.absolute() for file in files], root.absolute(), folder / "tree")
    if home:
        name_home(folder / "tree/pyproject.toml", home)
    before = os.getcwd()
    os.environ["SOURCE_DATE_EPOCH"] = EPOCH
    os.chdir(folder / "tree")
    try:
        made = {"wheel": build_wheel, "sdist": build_sdist}[kind](str(folder))
    finally:
        os.chdir(before)
    return folder / made


def main() -> None:
    """Write --out, whose name has to be that of the metadata."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", required=True, choices=["wheel", "sdist"])
    parser.add_argument("--root", required=True, type=Path, help="the library's folder")
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--home", default="", help="where others read the tree (HOME of version.bzl)")
    parser.add_argument("files", nargs="+", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        made = build(args.kind, args.files, args.root, Path(folder), args.home)
        if made.name != args.out.name:
            raise SystemExit(f"the metadata names it {made.name}, not {args.out.name}: ./bazelw run //build:version")
        shutil.copyfile(made, args.out)


if __name__ == "__main__":
    main()
