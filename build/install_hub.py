"""Install the packages of a lock file for Bazel: a folder and a py_library for each.

Run by the repository rule in hub.bzl with the machine's own Python. pip downloads and installs, so its configuration,
mirrors and caches hold; the split into one folder a package and the dependency lists, read from the wheels, are ours.
"""

import argparse
import email.parser
import hashlib
import os
import py_compile
import re
import shutil
import subprocess
import sys
import zipfile
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path

ROOT_BUILD = """package(default_visibility = ["//visibility:public"])

exports_files(["wheels"])

filegroup(
    name = "wheel_files",
    srcs = ["wheels"] + glob(
        ["changed.txt"],
        allow_empty = True,
    ),
)
"""

# How pip names the interpreter at the head of a script; where it is long, through a shell, in lines that Python skips.
SHEBANG = re.compile(rb"#!(?:/bin/sh\n'''exec' [^\n]*\n' '''|[^\n]*python[^\n]*)\n")

# The folder of a package has the name by which tools tell other people's code from ours. Hypothesis reads the source of
# all of ours for numbers and words to try: under another name, torch's and transformers' too, half a minute a test.
SITE = "site-packages"

# `changed.txt` is there where a package is other than installed (hub_look.py).
PACKAGE_BUILD = """load("@rules_python//python:defs.bzl", "py_library")

package(default_visibility = ["//visibility:public"])

py_library(
    name = "{name}",
    deps = [
{deps}
    ],
)

py_library(
    name = "alone",
    data = ["site-packages"] + glob(
        ["changed.txt"],
        allow_empty = True,
    ),
    imports = ["site-packages"],
)
"""


def normal(name: str) -> str:
    """Return the normal spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def label_name(name: str) -> str:
    """Return the name of a distribution's folder and target."""
    return normal(name).replace("-", "_")


def pip_command(target: Path) -> list[str]:
    """Return this interpreter's pip, or that of a virtual environment made for it."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0:
        return [sys.executable, "-m", "pip"]
    made = subprocess.run([sys.executable, "-m", "venv", str(target / "pip")], check=False)
    if made.returncode:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        sys.exit(f"{sys.executable} has no pip. Fix (Debian): apt-get install python3-pip python{version}-venv")
    return [str(target / "pip/bin/python"), "-m", "pip"]


def run_pip(command: list[str], failure: str) -> None:
    """Run pip; exit with its last words and `failure` if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        words = [line for line in (done.stdout + done.stderr).splitlines() if "is ignored: it is neither" not in line]
        sys.exit("\n".join([*words[-20:], failure]))


def download(pip: list[str], entries: dict[str, str], target: Path, folder: str = "wheels") -> None:
    """Download the wheels of these lock entries, checked against their hashes."""
    lock = target / "wanted.txt"
    lock.write_text("".join(entries.values()))
    options = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    command = [*pip, "download", *options, "-r", str(lock), "-d", str(target / folder)]
    run_pip(command, "pip could not download what the lock lists; its last words stand above.")


def unpack_source(pip: list[str], name: str, entry: str, target: Path) -> None:
    """Unpack a source distribution, checked against its hashes, into the package's folder; build nothing.

    pip cannot just download one: it unpacks it and asks it for its metadata, which takes what it is built with. Without
    isolation that is absent, pip gives up, and `--no-clean` leaves what it unpacked.
    """
    folder = target / "unpacked"
    folder.mkdir()
    lock = target / "wanted.txt"
    lock.write_text(entry)
    options = ["--no-deps", "--require-hashes", "--no-binary=:all:", "--disable-pip-version-check", "-q"]
    command = [*pip, "download", *options, "--no-build-isolation", "--no-clean", "-r", str(lock), "-d", str(folder)]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    trees = [path.parent for path in folder.glob("*/*/PKG-INFO")]
    if len(trees) != 1:
        sys.exit(f"{done.stdout}{done.stderr}pip could not unpack the source distribution of {name}.")
    site = target / label_name(name) / SITE
    site.mkdir(parents=True)
    trees[0].rename(site / f"{name}-sources")
    shutil.rmtree(folder)


def download_local_build(pip: list[str], entry: str, target: Path) -> None:
    """Download a wheel of which this machine's pip may prefer a local build (torch +cpu), by the same hashes.

    pip in hash mode would never choose a local file over one whose hash is in the index.
    """
    pinned = entry.split()[0]
    options = ["--no-deps", "--only-binary=:all:", "--disable-pip-version-check", "-q"]
    folder = target / "local_build"
    run_pip([*pip, "download", *options, pinned, "-d", str(folder)], f"pip finds no wheel of {pinned}.")
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if f"--hash=sha256:{digest}" not in entry:
        sys.exit(
            f"pip offers {wheel.name} with sha256 {digest}, which the lock does not list. "
            "If you trust where it comes from, add the hash: `./bazelw run //build:lock` does."
        )
    shutil.move(wheel, target / "wheels" / wheel.name)
    folder.rmdir()


def lock_entries(lock: Path) -> dict[str, str]:
    """Return the lines of a lock file by distribution: where it differs by Python, a pin with its marker for each."""
    entries: dict[str, str] = {}
    name = ""
    for line in lock.read_text().splitlines():
        start = re.match(r"([A-Za-z0-9._-]+)(\[.*\])?==", line)
        if start:
            name = normal(start[1])
            entries.setdefault(name, "")
        if name:
            entries[name] += line + "\n"
    return entries


class Wheels:
    """The metadata of the downloaded wheels.

    Packages of another hub (`base`) are not examined; those that nobody imports (`without`) are ignored.
    """

    def __init__(self, folder: Path, base: frozenset[str] = frozenset(), without: frozenset[str] = frozenset()) -> None:
        self.base = base
        self.without = without
        self.requires: dict[str, list[str]] = {}
        self.versions: dict[str, str] = {}
        for path in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(path) as archive:
                inside = next(n for n in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", n))
                metadata = email.parser.Parser().parsestr(archive.read(inside).decode())
            name = normal(metadata["Name"])
            if name in self.requires:
                sys.exit(f"{folder} holds two wheels of {name}")
            self.requires[name] = metadata.get_all("Requires-Dist") or []
            self.versions[name] = metadata["Version"]
            if name == "packaging":
                sys.path.insert(0, str(path))
        for path in (folder.parent / "reader").glob("*.whl"):
            sys.path.insert(0, str(path))

    def direct(self, name: str, extra: str) -> set[tuple[str, str]]:
        """Return the (distribution, extra) pairs that this pair needs on this machine."""
        if not self.requires[name]:
            return set()
        if "packaging" not in self.requires and "packaging" not in self.base:
            sys.exit("a lock file must hold the distribution `packaging`: its markers are read with it")
        from packaging.requirements import Requirement

        pairs = set()
        for text in self.requires[name]:
            need = Requirement(text)
            if need.marker is None or need.marker.evaluate({"extra": extra}):
                pairs |= {(normal(need.name), e) for e in {"", *need.extras}}
        return {(need, extra) for need, extra in pairs if need not in self.without}

    def closure(self, name: str) -> tuple[set[str], set[str]]:
        """Return (all distributions that one needs, directly or not; the missing ones)."""
        seen, missing, todo = set(), set(), [(name, "")]
        while todo:
            item = todo.pop()
            if item in seen:
                continue
            if item[0] in self.base:
                seen.add(item)
                continue
            if item[0] not in self.requires:
                missing.add(item[0])
                continue
            seen.add(item)
            todo += self.direct(*item)
        return {n for n, _ in seen}, missing


def complete(
    pip: list[str], target: Path, fallback: Path | None, base: frozenset[str], without: frozenset[str]
) -> Wheels:
    """Return the wheels, with those that their metadata needs beyond the lock, from the fallback lock."""
    while True:
        wheels = Wheels(target / "wheels", base, without)
        missing = set().union(*(wheels.closure(name)[1] for name in wheels.requires))
        if not missing:
            return wheels
        known = lock_entries(fallback) if fallback else {}
        unknown = sorted(missing - known.keys())
        if unknown:
            sys.exit(
                f"the wheels need {', '.join(unknown)}, which no lock file lists. "
                "Add what asks for it to the .in file and make the locks again: ./bazelw run //build:lock"
            )
        download(pip, {name: known[name] for name in sorted(missing)}, target)


def forget_place(info: Path) -> None:
    """Remove the folder names of this installation from an installed distribution.

    pip records the wheel's place (direct_url.json), and writes its own interpreter into the scripts. In RECORD the
    former is removed, and the latter lose their old sums.
    """
    rows = []
    for row in (info / "RECORD").read_text().splitlines():
        name = row.rsplit(",", 2)[0].strip('"')
        path = info.parent / re.sub(r"^(\.\./)+", "", name)
        if name == f"{info.name}/direct_url.json":
            path.unlink()
            continue
        if path.parent.name == "bin" and path.is_file() and (shebang := SHEBANG.match(path.read_bytes())):
            path.write_bytes(b"#!/usr/bin/env python3\n" + shebang.string[shebang.end() :])
            row = f"{name},,"
        rows.append(row)
    (info / "RECORD").write_text("".join(f"{row}\n" for row in rows))


def split(together: Path, target: Path) -> list[str]:
    """Move each distribution, by its RECORD, from the common folder into its own."""
    names = []
    for info in sorted(together.glob("*.dist-info")):
        forget_place(info)
        name = normal(email.parser.Parser().parsestr((info / "METADATA").read_text())["Name"])
        names.append(name)
        site = target / label_name(name) / SITE
        for row in (info / "RECORD").read_text().splitlines():
            relative = re.sub(r"^(\.\./)+", "", row.rsplit(",", 2)[0].strip('"'))
            source, goal = together / relative, site / relative
            if source.is_file():
                goal.parent.mkdir(parents=True, exist_ok=True)
                os.replace(source, goal)
    shutil.rmtree(together)
    return names


def compile_source(target: Path, path: Path) -> None:
    """Compile to byte code that is never checked against its source, except what is no Python of this version.

    It names its source from the hub's folder on, so that the same wheels give the same bytes in any clone; when it is
    imported, Python puts the real path there.
    """
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(path), dfile=str(path.relative_to(target)), quiet=2, invalidation_mode=unchecked)


def install(pip: list[str], target: Path) -> list[str]:
    """Install all wheels, split them and compile them (test sandboxes cannot write byte code)."""
    together = target / "together"
    wheels = sorted(str(path) for path in (target / "wheels").glob("*.whl"))
    options = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check", "-q"]
    run_pip([*pip, "install", *options, "--target", str(together), *wheels], "pip could not install the wheels.")
    names = split(together, target)
    sources = [path for path in target.glob(f"*/{SITE}/**/*.py") if path.is_file()]
    with ProcessPoolExecutor() as pool:
        for _ in pool.map(partial(compile_source, target), sources, chunksize=200):
            pass
    return names


def dependency(name: str, base_hub: str | None) -> str:
    """Return the label of a distribution alone, or of one in the hub below with all it needs."""
    return f"@{base_hub}//{label_name(name)}" if base_hub else f"//{label_name(name)}:alone"


def main() -> None:
    """Make the repository in --target."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hub", required=True)
    parser.add_argument("--lock", required=True, type=Path)
    parser.add_argument("--fallback-lock", type=Path)
    parser.add_argument("--local-build", action="append", default=[])
    parser.add_argument("--data-only", action="store_true")
    parser.add_argument("--base-hub", help="the hub under this one: its packages are depended on, not installed")
    parser.add_argument("--base-lock", type=Path)
    parser.add_argument("--base-package", action="append", default=[], help="only these of the hub under this one")
    parser.add_argument("--without", action="append", default=[], help="what a wheel asks for and nobody imports")
    parser.add_argument("--source", action="append", default=[], help="its source distribution, unpacked, not built")
    parser.add_argument("--target", required=True, type=Path)
    args = parser.parse_args()
    pip = pip_command(args.target)
    (args.target / "wheels").mkdir()
    entries = lock_entries(args.lock)
    for name in set(args.local_build) & entries.keys():
        download_local_build(pip, entries.pop(name), args.target)
    sources = {name: entries.pop(name) for name in args.source}
    download(pip, entries, args.target)
    below = lock_entries(args.base_lock) if args.base_lock else {}
    if args.base_package:
        below = {name: below[name] for name in args.base_package}
    if below and "packaging" not in entries:
        (args.target / "reader").mkdir()  # markers are read with `packaging`
        download(pip, {"packaging": below["packaging"]}, args.target, "reader")
    if args.data_only:
        wheels = Wheels(args.target / "wheels")
        wheels.requires = {name: [] for name in [*wheels.requires, *args.source]}
    else:
        wheels = complete(pip, args.target, args.fallback_lock, frozenset(below), frozenset(args.without))
    names = install(pip, args.target) + args.source
    for name, entry in sources.items():
        unpack_source(pip, name, entry, args.target)
    (args.target / "wanted.txt").unlink()
    (args.target / "BUILD.bazel").write_text(ROOT_BUILD)
    for name in names:
        deps = sorted(wheels.closure(name)[0])
        lines = "\n".join(f'        "{dependency(n, args.base_hub if n in below else None)}",' for n in deps)
        text = PACKAGE_BUILD.format(name=label_name(name), deps=lines)
        (args.target / label_name(name) / "BUILD.bazel").write_text(text)
    print(f"@{args.hub}: {len(names)} packages of {args.lock.name}, torch {wheels.versions.get('torch', 'absent')}")


if __name__ == "__main__":
    main()
