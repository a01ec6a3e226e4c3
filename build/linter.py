"""Runs the hub's ruff or mypy over the tree: `./bazelw run //build:ruff -- check`, `./bazelw run //build:mypy`."""

import os
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


def main() -> None:
    """`linter.py ruff|mypy ARGUMENTS`, from the top of the tree."""
    os.chdir(os.environ["BUILD_WORKSPACE_DIRECTORY"])
    tool, *args = sys.argv[1:]
    sys.exit({"ruff": ruff, "mypy": mypy}[tool](args))


if __name__ == "__main__":
    main()
