"""Each library installs by pip into a clean environment, from the tree or from an index, and never brings a stranger's.

The names `seqpack`, `engines`, `rollout`, ... belong to other people on the public index. The index here is a folder
that holds the hub's wheels, ours under `tessera-*`, and a decoy under each bare name.
"""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pip as pip_package
import pytest

LIBRARY = os.environ["LIBRARY"]
SIBLINGS = [name for name in os.environ["SIBLINGS"].split(",") if name]
OURS = ["seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "runlog"]
ROOT = Path(__file__).absolute().parents[2]
WHEELS = ROOT.parent / "pypi/wheels"

# Run by the new environment's interpreter, away from the tree: every name that the facade offers without an extra, and
# that each library comes from its `tessera-` distribution and from no other.
CHECK = """
import importlib, re, sys
from importlib.metadata import distributions, packages_distributions
name, ours = sys.argv[1], sys.argv[2].split(",")
strangers = {d.metadata["Name"].replace("-", "_") for d in distributions()} & set(ours)
assert not strangers, f"installed under a bare name: {strangers}"
library = importlib.import_module(name)
distribution = "tessera-" + name.replace("_", "-")
assert packages_distributions()[name] == [distribution], packages_distributions()[name]
assert "site-packages" in library.__file__, library.__file__
extra = re.compile(rf"{distribution}\\[\\w+\\]")
names = [name for name in dir(library) if not name.startswith("_")]
for name in names:
    try:
        getattr(library, name)
    except ImportError as error:
        if not extra.search(str(error)):
            raise
        print(f"{name} asks for its extra: {error}")
print(f"{distribution}: {len(names)} names")
"""


def distribution(name: str) -> str:
    """The published name of a library."""
    return "tessera-" + name.replace("_", "-")


def _run(command: list[str], cwd: Path, **env: str) -> str:
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def _pip(arguments: list[str], folder: Path) -> str:
    env = {
        "PYTHONPATH": str(Path(pip_package.__file__).parents[1]),
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": f"file://{folder}/index",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
        "PIP_NO_CACHE_DIR": "1",
    }
    return _run([sys.executable, "-m", "pip", *arguments], folder, **env)


def _write_decoy(folder: Path, name: str) -> None:
    """Write a wheel of a stranger's package: any version that a resolver would like, and an import that fails."""
    version = "1.0.0"
    info = f"{name}-{version}.dist-info"
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError('this is not the package that was meant')\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: decoy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def _write_index(index: Path, folders: list[Path]) -> None:
    """Write the pages of PEP 503: a folder for each distribution, with a link to each of its wheels."""
    for wheel in sorted(path for folder in folders for path in folder.glob("*.whl")):
        page = index / re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower() / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        with page.open("a") as file:
            file.write(f'<a href="file://{wheel.resolve()}">{wheel.name}</a><br>\n')


@pytest.fixture
def clean(tmp_path: Path) -> Path:
    """A folder with an environment without packages or pip, copies of the libraries, and an index with decoys."""
    _run([sys.executable, "-I", "-m", "venv", "--without-pip", str(tmp_path / "venv")], tmp_path)
    for name in [LIBRARY, *SIBLINGS]:
        source = (ROOT / "libs" / name).resolve()
        shutil.copytree(source, tmp_path / "libs" / name, copy_function=shutil.copyfile)
    decoys = tmp_path / "decoys"
    decoys.mkdir()
    for name in OURS:
        _write_decoy(decoys, name)
    _write_index(tmp_path / "index", [WHEELS, decoys])
    return tmp_path


def _install_and_check(clean: Path, wanted: list[str]) -> None:
    python = str(clean / "venv/bin/python")
    _pip(["--python", python, "install", "-q", "--no-compile", *wanted], clean)
    away = clean / "away"
    away.mkdir()
    print(_run([python, "-I", "-c", CHECK, LIBRARY, ",".join(OURS)], away))


def test_the_decoys_would_be_taken(clean: Path) -> None:
    """A requirement under a bare name finds the stranger's package: the index is one in which the mistake shows."""
    found = _pip(["download", "-q", "--no-deps", "-d", "got", LIBRARY], clean)
    assert [path.name for path in (clean / "got").iterdir()] == [f"{LIBRARY}-1.0.0-py3-none-any.whl"], found


def test_the_readme_line_installs_it_from_the_tree(clean: Path) -> None:
    """The line that the library's README gives, as it stands."""
    readme = (clean / "libs" / LIBRARY / "README.md").read_text()
    (line,) = re.findall(r"pip install ((?:\./libs/\w+ ?)+)", readme)
    assert line.split() == [f"./libs/{name}" for name in [*SIBLINGS, LIBRARY]]
    _install_and_check(clean, line.split())


def test_it_installs_from_an_index(clean: Path) -> None:
    """By its published name, siblings by the versions that its metadata pins."""
    (clean / "dist").mkdir()
    for name in [LIBRARY, *SIBLINGS]:
        _pip(["wheel", "-q", "--no-deps", "-w", "dist", f"./libs/{name}"], clean)
    for page in (clean / "index").glob("tessera-*"):
        shutil.rmtree(page)
    _write_index(clean / "index", [clean / "dist"])
    _install_and_check(clean, [distribution(LIBRARY)])
