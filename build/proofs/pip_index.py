"""Wheels of the hubs and of the tree as an index for pip, and what pip would install from it: for tests of installs."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import hatchling
import pip as pip_package

ROOT = Path(__file__).absolute().parents[2]
# HUB/PACKAGE/site-packages/MODULE/__init__.py, whatever Bazel calls the hub's folder: with modules it is another name.
HUB, TOOLS = (Path(module.__file__).absolute().parents[3] for module in (pip_package, hatchling))


def distribution(name: str) -> str:
    """Return the published name of a library."""
    return "tessera-" + name.replace("_", "-")


def normal(name: str) -> str:
    """Return the one spelling of a distribution's name."""
    return re.sub(r"[-_.]+", "-", name).lower()


def run(command: list[str], cwd: Path, **env: str) -> str:
    """Return what a command prints; AssertionError with its last lines where it fails."""
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def pip(arguments: list[str], folder: Path, index: Path, *sites: Path, python: Path = Path(sys.executable)) -> str:
    """Run pip in that interpreter: with `--python` it would start twice."""
    env = {
        "PYTHONPATH": os.pathsep.join(map(str, [Path(pip_package.__file__).parents[1], *sites])),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"file://{index}",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
    }
    return run([str(python), "-m", "pip", *arguments], folder, **env)


def write_index(index: Path, folders: list[Path]) -> Path:
    """Write the pages of PEP 503: a folder for each distribution, with a link to each of its wheels."""
    for wheel in sorted(path for folder in folders for path in folder.glob("*.whl")):
        page = index / normal(wheel.name.split("-")[0]) / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        link = f'<a href="file://{wheel.resolve()}">{wheel.name}</a><br>\n'
        if not page.exists() or link not in page.read_text():
            with page.open("a") as file:
                file.write(link)
    return index


def wheel_of(package: str, version: str) -> Path:
    """Return the wheel that Bazel built of a package, "libs/seqpack" or "apps"."""
    return ROOT / package / f"tessera_{package.rpartition('/')[2]}-{version}-py3-none-any.whl"


def make_venv(folder: Path) -> Path:
    """Make an environment without packages or pip."""
    run([sys.executable, "-I", "-m", "venv", "--without-pip", str(folder)], folder.parent)
    return folder


def resolve(wanted: list[str], folder: Path, index: Path, venv: Path, *sites: Path) -> dict[str, str]:
    """Return what pip would install for these words, by its distribution: the version. `sites`: a build backend's."""
    options = ["-q", "--dry-run", "--ignore-installed", "--report", "report.json"]
    options += ["--no-build-isolation"] if sites else []
    pip(["install", *options, *wanted], folder, index, *sites, python=venv / "bin/python")
    packages = [item["metadata"] for item in json.loads((folder / "report.json").read_text())["install"]]
    return {normal(item["name"]): item["version"] for item in packages}


def install(wheels: list[Path], versions: dict[str, str], venv: Path, index: Path) -> Path:
    """Install our wheels into an environment; the rest of `versions` it sees in the hub. Return its Python."""
    python = venv / "bin/python"
    pip(["install", "-q", "--no-compile", "--no-deps", "--no-index", *map(str, wheels)], venv, index, python=python)
    theirs = [name.replace("-", "_") for name in sorted(versions) if not name.startswith("tessera-")]
    sites = [HUB / name / "site-packages" for name in theirs]
    assert all(site.is_dir() for site in sites), sites
    (packages,) = venv.glob("lib/python3*/site-packages")
    (packages / "hub.pth").write_text("".join(f"{site}\n" for site in sites))
    return python
