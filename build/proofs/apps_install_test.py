"""`tessera-apps` and the libraries install from wheels; the commands and Python calls work there, away from the tree.

Long: each command imports torch, and runs of one and two ranks train a few steps. Of other people's packages the hub
has wheels for one Python, so other Pythons of this machine compile what the wheels hold; `apps_pythons.py` runs by hand
for them, with packages from the index.
"""

import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import apps_commands
import pytest
from pip_index import HUB, ROOT, TOOLS, distribution, install, make_venv, resolve, wheel_of, write_index

VERSION = os.environ["VERSION"]
LIBRARIES = os.environ["LIBRARIES"].split(",")
BACKEND = ["hatchling", "packaging", "pathspec", "pluggy", "trove_classifiers"]
OURS = {"tessera-apps", *map(distribution, LIBRARIES)}
WHEELS = [wheel_of(package, VERSION) for package in ["apps", *(f"libs/{name}" for name in LIBRARIES)]]
PYTHONS = ("python3.11", "python3.12", "python3.13")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index of the hub's wheels and ours."""
    return write_index(tmp_path_factory.mktemp("index"), [HUB / "wheels", *(wheel.parent for wheel in WHEELS)])


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory, index: Path) -> Path:
    """The programs of an environment with nothing but our wheels and what they ask for."""
    folder = tmp_path_factory.mktemp("installed")
    venv = make_venv(folder / "venv")
    found = resolve(["tessera-apps"], folder, index, venv)
    assert {name for name in found if name.startswith("tessera-")} == OURS
    return install(WHEELS, found, venv, index).parent


def test_the_commands_and_calls_work_from_wheels(programs: Path, tmp_path: Path) -> None:
    apps_commands.check(programs, tmp_path)


def test_own_code_of_each_choice_trains_from_wheels(programs: Path, tmp_path: Path) -> None:
    """The page extend.md, as it stands."""
    page = ROOT / "docs/extend.md"
    told = apps_commands.run([str(programs / "python"), str(ROOT / "docs/extend_run.py"), str(page)], tmp_path)
    assert len(re.findall(r"^ran ", told, re.M)) == 12, told[-2000:]


def test_the_line_of_the_readme_installs_the_same(tmp_path: Path) -> None:
    """As it stands, in a checkout, where an index has nothing of ours."""
    (line,) = re.findall(r"^    pip install (\./libs/\*/ \./apps)\b", (ROOT / "README.md").read_text(), re.M)
    for name in [*(f"libs/{library}" for library in LIBRARIES), "apps"]:
        shutil.copytree((ROOT / name).resolve(), tmp_path / name, copy_function=shutil.copyfile)
    words = [str(path) for word in line.split() for path in sorted(tmp_path.glob(word)) if path.is_dir()]
    assert len(words) == len(OURS)
    theirs = write_index(tmp_path / "index", [HUB / "wheels", TOOLS / "wheels"])
    sites = [TOOLS / name / "site-packages" for name in BACKEND]
    found = resolve(words, tmp_path, theirs, make_venv(tmp_path / "venv"), *sites)
    assert {name for name in found if name.startswith("tessera-")} == OURS


def starts(python: str) -> bool:
    """Whether this machine has an interpreter of that name, and no launcher without a version behind it."""
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "-Ic", ""], capture_output=True, check=False).returncode == 0


def test_each_python_here_compiles_what_the_wheels_hold(tmp_path: Path) -> None:
    for wheel in WHEELS:
        zipfile.ZipFile(wheel).extractall(tmp_path)
    found = [python for python in PYTHONS if starts(python)]
    assert found
    for python in found:
        command = [python, "-I", "-W", "error", "-m", "compileall", "-q", "-f", str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
