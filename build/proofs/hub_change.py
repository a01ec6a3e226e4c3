"""A changed file inside a hub reruns what depends on it: `./bazelw run //build/proofs:hub_change [-- TARGET]`.

Builds a target (//libs/runlog:wheel, whose backend is of the hub @pypi_tools) in an output base of its own: as it is;
again, which must run nothing; with a comment added to a file of hatchling in the hub, which must run the build again;
with the file as it was. Bazel looks into a hub's folders because it is told to (BAZEL_TRACK_SOURCE_DIRECTORIES); what
the same change does without it is printed too.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

TRACKED = "--host_jvm_args=-DBAZEL_TRACK_SOURCE_DIRECTORIES=1"


def ran(base: Path, target: str, startup: list[str]) -> int:
    """How many actions a build ran; ends with Bazel's words where it fails."""
    command = [
        "./bazelw",
        f"--output_base={base}",
        "--max_idle_secs=15",
        *startup,
        "build",
        "--noshow_progress",
        target,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    counts = re.findall(r"(\d+) process(?:es)?: ([^\n]*)", done.stdout + done.stderr)[-1][1]
    return sum(int(count) for count, kind in re.findall(r"(\d+) ([\w-]+)", counts) if kind != "internal")


def main() -> None:
    """Print the actions of each build; 1 where one differs from what is promised."""
    os.chdir(os.environ.get("BUILD_WORKSPACE_DIRECTORY", "."))
    target = sys.argv[1] if len(sys.argv) > 1 else "//libs/runlog:wheel"
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        first, again = ran(base, target, [TRACKED]), ran(base, target, [TRACKED])
        (file,) = (base / "external/pypi_tools/hatchling/site-packages/hatchling").glob("__init__.py")
        before = file.read_bytes()
        file.write_bytes(before + b"# changed\n")
        changed = ran(base, target, [TRACKED])
        file.write_bytes(before)
        restored = ran(base, target, [TRACKED])
        ran(base, target, [])
        file.write_bytes(before + b"# changed\n")
        unseen = ran(base, target, [])
        subprocess.run(["./bazelw", f"--output_base={base}", "shutdown"], capture_output=True, check=False)
        subprocess.run(["chmod", "-R", "u+w", folder], check=True)  # Bazel's folders are read-only
    print(f"first {first}, again {again}, changed {changed}, restored {restored}; untracked: changed {unseen}")
    sys.exit(int(not (first > 0 and again == 0 and changed > 0 and restored > 0)))


if __name__ == "__main__":
    main()
