"""Make `.venv`, an environment for editors and plain pytest: `./bazelw run //build:venv`.

It holds no copies: a .pth file names the folders of the hubs' packages and of the tree's libraries, so that it has the
locked versions, and edits show at once. Commands of the packages (pytest, ruff, mypy, pre-commit, ...) get scripts in
its bin.
"""

import configparser
import os
import stat
import sys
import venv
from pathlib import Path

LIBRARIES = ["seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "runlog", "runplan", "schedules"]
SCRIPT = """#!{python}
import sys

from {module} import {name}

if __name__ == "__main__":
    sys.exit({name}{rest}())
"""


def packages(paths: list[str]) -> list[Path]:
    """Return the hubs' folders among these, by their real paths: those in a build's own tree vanish with it."""
    theirs = [path for path in map(Path, paths) if path.name == "site-packages" and path.is_dir()]
    return list(dict.fromkeys(path.resolve() for path in theirs if not path.is_relative_to(sys.prefix)))


def scripts(site: Path) -> dict[str, tuple[str, str]]:
    """Return {name: (module, object)} of the console scripts of a package."""
    commands = {}
    for path in site.glob("*.dist-info/entry_points.txt"):
        parser = configparser.ConfigParser(delimiters=("=",), strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
        parser.read_string(path.read_text())
        for name, value in parser.items("console_scripts") if parser.has_section("console_scripts") else ():
            module, _, target = value.split("[")[0].strip().partition(":")
            commands[name] = (module, target)
    return commands


def write_scripts(sites: list[Path], bin_folder: Path) -> None:
    """Write the commands of the packages: Python ones by their entry points, programs by links."""
    for site in sites:
        for name, (module, target) in scripts(site).items():
            first, _, rest = target.partition(".")
            text = SCRIPT.format(
                python=bin_folder / "python", module=module, name=first, rest="." + rest if rest else ""
            )
            write_program(bin_folder / name, text)
        for program in site.glob("bin/*"):
            goal = bin_folder / program.name
            if not goal.exists() and program.is_file() and program.read_bytes()[:4] == b"\x7fELF":
                goal.symlink_to(program)


def write_program(path: Path, text: str) -> None:
    """Write an executable file, over an existing one."""
    path.unlink(missing_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)


def make(folder: Path, root: Path, sites: list[Path]) -> None:
    """Make or remake the environment."""
    venv.EnvBuilder(clear=True, symlinks=True).create(folder)
    (site_packages,) = folder.glob("lib/python3*/site-packages")
    trees = [root, *(root / "libs" / name for name in LIBRARIES)]
    (site_packages / "tessera.pth").write_text("".join(f"{path}\n" for path in [*trees, *sites]))
    write_scripts(sites, folder / "bin")


def main() -> None:
    """Make `.venv` at the top of the tree, or the named folder."""
    root = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path.cwd()))
    folder = root / (sys.argv[1] if len(sys.argv) > 1 else ".venv")
    sites = packages(sys.path)
    make(folder, root, sites)
    print(f"{folder}: {len(sites)} packages and {len(LIBRARIES)} libraries; python is {folder / 'bin/python'}")


if __name__ == "__main__":
    main()
