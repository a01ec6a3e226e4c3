"""Run a hub's linter over the tree: `./bazelw run //build:ruff -- check`, `//build:mypy`, `//build:shellcheck`."""

import os
import re
import subprocess
import sys
from pathlib import Path

LIBRARIES = ["seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "runlog", "runplan", "schedules"]


def ruff(args: list[str]) -> None:
    """Replace this process by ruff's binary."""
    import ruff as package

    binary = Path(package.__file__).parent.parent / "bin/ruff"
    os.execv(binary, ["ruff", *(args or ["check"])])


# The tests and benchmarks of libraries and apps, checked as strictly as the code.
TESTS = ("libs/*_test.py", "libs/*/benchmarks/*.py", "apps/*_test.py", "apps/*/benchmarks/*.py")


def mypy(args: list[str]) -> int:
    """Check the libraries' and apps' own files strictly, then their tests and benchmarks; or the named files."""
    targets = args or [f"libs/{name}/{name}" for name in LIBRARIES if Path("libs", name, name).is_dir()] + ["apps"]
    return mypy_status(targets) or (0 if args else mypy_status(tracked(*TESTS)))


def mypy_status(args: list[str]) -> int:
    """Run mypy on these files, print its output and return its status."""
    from mypy import api

    out, err, status = api.run(["--config-file=pyproject.toml", *args])
    print(out, end="")
    print(err, end="", file=sys.stderr)
    return status


def tracked(*patterns: str) -> list[str]:
    """Return the tracked files that match these patterns and exist."""
    command = ["git", "ls-files", "-z", *patterns]
    listed = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    return [name for name in listed.split("\0") if name and Path(name).is_file()]


def shell_scripts() -> list[str]:
    """Return the tracked files that a shell runs."""
    return [name for name in tracked() if re.match(rb"#!.*\b(ba|da)?sh\b", Path(name).read_bytes()[:80])]


def shellcheck(args: list[str]) -> None:
    """Replace this process by shellcheck's binary, which its package keeps beside no module."""
    binary = next(path for folder in sys.path if (path := Path(folder, "bin/shellcheck")).is_file())
    os.execv(binary, ["shellcheck", *(args or shell_scripts())])


def main() -> None:
    """Run `linter.py ruff|mypy|shellcheck ARGUMENTS` from the top of the tree."""
    os.chdir(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    tool, *args = sys.argv[1:]
    sys.exit({"ruff": ruff, "mypy": mypy, "shellcheck": shellcheck}[tool](args))


if __name__ == "__main__":
    main()
