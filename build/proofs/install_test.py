"""`pip install ./libs/NAME` works in a clean environment, offline, from the hub's wheels, and NAME imports alone."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pip as pip_package
import pytest

LIBRARY = os.environ["LIBRARY"]
SIBLINGS = [name for name in os.environ["SIBLINGS"].split(",") if name]
ROOT = Path(__file__).absolute().parents[2]
WHEELS = ROOT.parent / "pypi/wheels"

# Run by the new environment's interpreter, away from the tree: every name that the facade offers without an extra.
CHECK = """
import importlib, re, sys
library = importlib.import_module(sys.argv[1])
extra = re.compile(rf"{sys.argv[1]}\\[\\w+\\]")
assert "site-packages" in library.__file__, library.__file__
names = [name for name in dir(library) if not name.startswith("_")]
for name in names:
    try:
        getattr(library, name)
    except ImportError as error:
        if not extra.search(str(error)):
            raise
        print(f"{name} asks for its extra: {error}")
print(f"{sys.argv[1]}: {len(names)} names")
"""


def _run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _pip(arguments: list[str], cwd: Path, links: Path) -> None:
    env = {
        "PYTHONPATH": str(Path(pip_package.__file__).parents[1]),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": f"{WHEELS} {links}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
    }
    _run([sys.executable, "-m", "pip", *arguments], cwd, **env)


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """An environment with neither packages nor pip, and copies of the library and of the siblings that it asks for."""
    _run([sys.executable, "-I", "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    (tmp_path / "links").mkdir()
    for name in [LIBRARY, *SIBLINGS]:
        source = (ROOT / "libs" / name).resolve()
        shutil.copytree(source, tmp_path / "libs" / name, copy_function=shutil.copyfile)
    return tmp_path


def test_installs_and_imports_alone(clean: Path) -> None:
    """Siblings are offered as wheels, as an index would; everything else, the build backend too, is in the hub."""
    for name in SIBLINGS:
        _pip(["wheel", "-q", "--no-deps", "-w", "links", f"./libs/{name}"], clean, clean / "links")
    python = str(clean / "venv/bin/python")
    _pip(["--python", python, "install", "-q", "--no-compile", f"./libs/{LIBRARY}"], clean, clean / "links")
    away = clean / "away"
    away.mkdir()
    print(_run([python, "-I", "-c", CHECK, LIBRARY], away))
