"""Runs a hub's linter over the tree: `./bazelw run //build:ruff -- check`, `//build:mypy`, `//build:shellcheck`."""

import os
import re
import subprocess
import sys
from pathlib import Path

LIBRARIES = ["seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "runlog"]


def ruff(args: list[str]) -> None:
    """Replaces this process by ruff's binary."""
    import ruff as package

    binary = Path(package.__file__).parent.parent / "bin/ruff"
    os.execv(binary, ["ruff", *(args or ["check"])])


def mypy(args: list[str]) -> int:
    """Checks the libraries' and apps' own files."""
    from mypy import api

    targets = args or [f"libs/{name}/{name}" for name in LIBRARIES if Path("libs", name, name).is_dir()] + ["apps"]
    out, err, status = api.run(["--config-file=pyproject.toml", *targets])
    print(out, end="")
    print(err, end="", file=sys.stderr)
    return status


def shell_scripts() -> list[str]:
    """The tracked files that a shell runs."""
    listed = subprocess.run(["git", "ls-files", "-z"], capture_output=True, check=True, text=True).stdout
    files = [Path(name) for name in listed.split("\0") if name and Path(name).is_file()]
    return [str(path) for path in files if re.match(rb"#!.*\b(ba|da)?sh\b", path.read_bytes()[:80])]


def shellcheck(args: list[str]) -> None:
    """Replaces this process by shellcheck's binary, which its package keeps beside no module."""
    binary = next(path for folder in sys.path if (path := Path(folder, "bin/shellcheck")).is_file())
    os.execv(binary, ["shellcheck", *(args or shell_scripts())])


def main() -> None:
    """`linter.py ruff|mypy|shellcheck ARGUMENTS`, from the top of the tree."""
    os.chdir(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    tool, *args = sys.argv[1:]
    sys.exit({"ruff": ruff, "mypy": mypy, "shellcheck": shellcheck}[tool](args))


if __name__ == "__main__":
    main()
