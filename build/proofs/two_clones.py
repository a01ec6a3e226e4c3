"""Two clones of one commit share a cache: `./bazelw run //build/proofs:two_clones [-- TARGETS]`.

Clones HEAD twice, builds the targets (//libs:wheels, which needs the hub @pypi_tools alone) in the first with an empty
disk cache and in the second with the same one, and fails unless every action of the second was found there. Both clones
install the hubs by themselves, so that byte code, interpreters and whatever else a build reads must not name a folder.
With test targets, tests run in the first clone and are found passed in the second. `--bazel=OPTION` goes to Bazel.

`--apart` shows that wheels and sdists are the same bytes wherever they are built: each clone has a cache of its own,
the second another umask and time zone too. Prints the sha256 of each file and fails unless the two agree in every one.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

KINDS = re.compile(r"(\d+) ([a-z][\w -]*)")


def processes(said: str) -> str:
    """Return Bazel's closing line about where actions ran: `7 processes: 3 remote cache hit, 4 internal`."""
    return re.findall(r"(\d+ process(?:es)?: [^\n]*)", said)[-1]


def run(clone: Path, base: Path, cache: Path, options: list[str], targets: list[str], elsewhere: bool = False) -> str:
    """Build and test in one clone; return the closing line. Exit with Bazel's output where it fails.

    `elsewhere` is another user's machine: files are made for their owner alone, and it is another hour.
    """
    command = ["./bazelw", f"--output_base={base}", "--max_idle_secs=5", "test", "--build_tests_only=false"]
    command += ["--noshow_progress", f"--disk_cache={cache}", *options, *targets]
    env = {**os.environ, "TZ": "Asia/Tokyo"} if elsewhere else None
    umask = 0o077 if elsewhere else -1
    done = subprocess.run(command, cwd=clone, env=env, umask=umask, capture_output=True, text=True, check=False)
    nothing_to_test = 4
    if done.returncode not in (0, nothing_to_test):
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    subprocess.run(["./bazelw", f"--output_base={base}", "shutdown"], cwd=clone, capture_output=True, check=False)
    return processes(done.stdout + done.stderr)


def found_and_ran(line: str) -> tuple[int, int]:
    """Return (actions found in a cache, actions that ran) of a closing line; those internal to Bazel are neither."""
    counts = {kind.strip(): int(count) for count, kind in KINDS.findall(line.partition(":")[2])}
    cached = sum(count for kind, count in counts.items() if kind.endswith("cache hit"))
    return cached, sum(counts.values()) - cached - counts.get("internal", 0)


def digests(clone: Path) -> dict[str, str]:
    """Return the sha256 of each wheel and sdist that a clone has built, by its path."""
    built = clone / "bazel-links/bin"
    files = sorted(path for end in ("whl", "tar.gz") for path in built.glob(f"libs/*/*.{end}"))
    return {str(path.relative_to(built)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def compared(first: dict[str, str], second: dict[str, str]) -> bool:
    """Print the sums of both clones; return whether there are any and each file has one sum."""
    for name in sorted({**first, **second}):
        same = first.get(name) == second.get(name)
        print(f"{first.get(name)} {name}" + ("" if same else f", and in the second clone {second.get(name)}"))
    equal = sum(second.get(name) == digest for name, digest in first.items())
    print(f"{equal} of {len({**first, **second})} files are the same bytes in both clones")
    return first == second and len(first) > 0


def main() -> None:
    """Print both closing lines; exit with 1 where an action ran in the second clone or, apart, a file differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", default=["//libs:wheels"])
    parser.add_argument("--bazel", action="append", default=[], metavar="OPTION")
    parser.add_argument("--apart", action="store_true", help="no cache is shared; the files are compared")
    args = parser.parse_args()
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    with tempfile.TemporaryDirectory() as folder:
        lines, made = [], []
        for name in ["first", "second"]:
            clone = Path(folder, name, "tree")
            subprocess.run(["git", "clone", "-q", str(root), str(clone)], check=True)
            cache = Path(folder, name, "cache") if args.apart else Path(folder, "cache")
            elsewhere = args.apart and name == "second"
            lines.append(run(clone, Path(folder, name, "base"), cache, args.bazel, args.targets, elsewhere))
            print(f"{name}: {lines[-1]}", flush=True)
            made.append(digests(clone))
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)  # Bazel's folders are read-only
    if args.apart:
        sys.exit(int(not compared(*made)))
    cached, ran = found_and_ran(lines[1])
    print(f"{cached} actions of the second clone were found, {ran} ran")
    sys.exit(int(ran > 0 or cached == 0))


if __name__ == "__main__":
    main()
