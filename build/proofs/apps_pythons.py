"""`tessera-apps` in a new environment of each Python, with packages from the index; its commands and calls run there.

By hand, as it downloads torch for each: `./bazelw run //build/proofs:apps_pythons -- python3.11 python3.12 python3.13`.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import apps_commands

ROOT = Path(__file__).absolute().parents[2]


def wheels(root: Path) -> list[Path]:
    """Return the wheels that Bazel built."""
    return sorted(root.glob("apps/*.whl")) + sorted(root.glob("libs/*/*.whl"))


def check(python: str, folder: Path) -> None:
    """Install the wheels for a Python and run what they promise."""
    subprocess.run([python, "-m", "venv", str(folder / "venv")], check=True)
    pip = [str(folder / "venv/bin/python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    subprocess.run([*pip, *map(str, wheels(ROOT))], check=True, cwd=folder)
    (folder / "away").mkdir()
    apps_commands.check(folder / "venv/bin", folder / "away")


def main() -> None:
    """Check each interpreter that the command line names."""
    os.environ.pop("PYTHONPATH", None)
    for python in sys.argv[1:] or [sys.executable]:
        with tempfile.TemporaryDirectory() as folder:
            check(python, Path(folder))
        print(f"{python}: the commands and calls of tessera-apps work")


if __name__ == "__main__":
    main()
