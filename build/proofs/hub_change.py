"""A change inside a hub reruns what depends on it, and nothing else: `./bazelw run //build/proofs:hub_change`.

Builds a target in an output base and with a disk cache of its own: as it is; again; with a comment added to a file of a
package that it needs; with the file as it was, its result found in the cache; with a file more; with that file gone;
with a module that cannot be imported, which must be what runs; and with a change in a package that it does not need.
By default the target is //libs/runlog:wheel, whose backend is of the hub @pypi_tools. For a test, with the hub @pypi:

    ./bazelw run //build/proofs:hub_change -- --test //libs/objectives:objectives_test @pypi//torch @pypi//ray
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = re.compile(r"(\d+) ([a-z][\w -]*)")
BROKEN = "this module was changed by hand"


class Builds:
    """Calls of ./bazelw for one target in one output base."""

    def __init__(self, folder: Path, command: str, target: str) -> None:
        self.base = folder / "base"
        self.words = [command, "--noshow_progress", f"--disk_cache={folder / 'cache'}", target]

    def call(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """Run ./bazelw and return its result."""
        command = ["./bazelw", f"--output_base={self.base}", "--max_idle_secs=120", *words]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def build(self) -> tuple[int, int]:
        """Build and return (actions that ran, actions in the cache); exit with Bazel's output where it fails."""
        done = self.call(*self.words)
        if done.returncode:
            sys.exit(f"{' '.join(done.args)}\n{done.stdout}\n{done.stderr}")
        line = re.findall(r"\d+ process(?:es)?: ([^\n]*)", done.stdout + done.stderr)[-1]
        counts = {kind.strip(): int(count) for count, kind in KINDS.findall(line)}
        cached = sum(count for kind, count in counts.items() if kind.endswith("cache hit"))
        return sum(counts.values()) - cached - counts.get("internal", 0), cached

    def fails(self) -> bool:
        """Return whether the build fails, by the module that cannot be imported."""
        done = self.call(*self.words)
        return done.returncode != 0 and BROKEN in done.stdout + done.stderr

    def module(self, label: str) -> Path:
        """Return the first module of a package: that of its name."""
        hub, name = label.removeprefix("@").split("//")
        return self.base / "external" / hub / name / "site-packages" / name / "__init__.py"


def steps(builds: Builds, needed: str, other: str) -> dict[str, bool]:
    """Run the steps; return whether the actions of each are the expected ones."""
    first, again = builds.build(), builds.build()
    module, unneeded = builds.module(needed), builds.module(other)
    before, new = module.read_bytes(), module.with_name("a_new_file.py")
    module.write_bytes(before + b"# changed\n")
    changed = builds.build()
    module.write_bytes(before)
    restored = builds.build()
    new.write_text("NEW = 1\n")
    added = builds.build()
    new.unlink()
    removed = builds.build()
    module.write_bytes(before + f"\nraise ImportError({BROKEN!r})\n".encode())
    broken = builds.fails()
    module.write_bytes(before)
    mended = builds.build()
    unneeded.write_bytes(unneeded.read_bytes() + b"# changed\n")
    beside = builds.build()
    return {
        f"first: {first[0]} ran": first[0] > 0,
        f"again: {sum(again)}": again == (0, 0),
        f"a file changed: {changed[0]} ran, {changed[1]} found": changed[0] > 0,
        f"restored: {restored[0]} ran, {restored[1]} found": restored[0] == 0 and restored[1] > 0,
        f"a file added: {added[0]} ran, {added[1]} found": added[0] > 0,
        f"removed: {removed[0]} ran, {removed[1]} found": removed[0] == 0 and removed[1] > 0,
        f"a module that cannot be imported: {'fails' if broken else 'does not fail'} by it": broken,
        # A test that failed is run by Bazel whatever a cache has.
        f"mended: {mended[0]} ran, {mended[1]} found": sum(mended) > 0,
        f"a file of {other} changed: {sum(beside)}": beside == (0, 0),
    }


def main() -> None:
    """Print each step; exit with 1 where one differs from what is expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="?", default="//libs/runlog:wheel")
    parser.add_argument("needed", nargs="?", default="@pypi_tools//hatchling", help="a package that the target needs")
    parser.add_argument("other", nargs="?", default="@pypi_tools//identify", help="one of its hub that it does not")
    parser.add_argument("--test", action="store_true", help="the target is a test")
    args = parser.parse_args()
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    with tempfile.TemporaryDirectory() as folder:
        builds = Builds(Path(folder), "test" if args.test else "build", args.target)
        try:
            verdicts = steps(builds, args.needed, args.other)
        finally:
            builds.call("shutdown")
            subprocess.run(["chmod", "-R", "u+w", folder], check=True)  # Bazel's folders are read-only
    print("\n".join(f"{step}{'' if right else '  <- wrong'}" for step, right in verdicts.items()))
    sys.exit(int(not all(verdicts.values())))


if __name__ == "__main__":
    main()
