"""Each library installs by pip, alone, and never brings a stranger's; in a clean environment its README's example runs.

The names `seqpack`, `engines`, `rollout`, ... belong to other people on the public index. The index here is a folder
that holds the hubs' wheels, ours under `tessera-*`, and a decoy under each bare name.

pip resolves each library against it and installs ours. What pip names of other people's is not unpacked again (torch
alone takes half a minute): the environment sees the hub's folder of each of those packages, and of no other.
"""

import os
import re
import shutil
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from pip_index import (
    HUB,
    ROOT,
    TOOLS,
    distribution,
    install,
    make_venv,
    normal,
    pip,
    resolve,
    run,
    wheel_of,
    write_index,
)

ARROWS = {
    library: [name for name in siblings.split(",") if name]
    for library, siblings in (pair.split(":") for pair in os.environ["ARROWS"].split(";"))
}
VERSION = os.environ["VERSION"]
LIBRARIES = sorted(ARROWS)
EXAMPLES = sorted(os.environ["EXAMPLES"].split(","))
"""Libraries whose examples run in an environment of their own; the others are resolved alone."""
BACKEND = ["hatchling", "packaging", "pathspec", "pluggy", "trove_classifiers"]

# Beyond the library itself: the extras that its example names, another library that it shows itself with, and what the
# example takes as given (its readme_test.py gives the same).
EXTRAS = {"seqpack": "[tensordict]", "rollout": "[native]", "runlog": "[report]"}
BESIDE = {"engines": "objectives"}
GIVEN = {
    "rollout": """
from types import SimpleNamespace
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_model
from rollout.testing.pieces import pieces_of
tokenizer = tiny_tokenizer()
model, trained = tiny_model(len(tokenizer)), tiny_model(len(tokenizer), seed=1)
trainer = SimpleNamespace(export_weights=lambda: pieces_of(trained.named_parameters()))
""",
    "schedules": """
from rollout.testing.chat import tiny_tokenizer
from rollout.testing.model import tiny_dense_model
if __name__ == "__main__":
    tiny_tokenizer().save_pretrained("model")
    tiny_dense_model(len(tiny_tokenizer())).save_pretrained("model")
""",
}

# What no lock has: its calls are tested against their published signatures alone (runlog's trackers).
UNTESTED = {"trackio"}

# Run by the new environment's interpreter, away from the tree: each library comes from its `tessera-` distribution and
# from no other, every name that the facade offers is there or asks for its extra, then the example.
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
assert library.__version__ == importlib.metadata.version(distribution)
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


def _write_decoy(folder: Path, name: str) -> None:
    """Write a wheel of a stranger's package: any version that a resolver would like, and an import that fails."""
    info = f"{name}-1.0.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}/__init__.py", "raise RuntimeError('this is not the package that was meant')\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0.0\n")
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: decoy\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture(scope="module")
def decoys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stranger's wheel under each bare name."""
    folder = tmp_path_factory.mktemp("decoys")
    for name in LIBRARIES:
        _write_decoy(folder, name)
    return folder


@pytest.fixture(scope="module")
def without_ours(tmp_path_factory: pytest.TempPathFactory, decoys: Path) -> Path:
    """An index of the hubs' wheels and the decoys."""
    return write_index(tmp_path_factory.mktemp("without_ours"), [HUB / "wheels", TOOLS / "wheels", decoys])


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, decoys: Path) -> Path:
    """The same with our wheels in it."""
    folders = [HUB / "wheels", decoys, *(wheel_of(f"libs/{name}", VERSION).parent for name in LIBRARIES)]
    return write_index(tmp_path_factory.mktemp("index"), folders)


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment without packages or pip, into which nothing is installed."""
    return make_venv(tmp_path_factory.mktemp("empty") / "venv")


def _check_ours(found: dict[str, str], libraries: set[str]) -> None:
    """Ours are those libraries, at the one version, and nobody's are under a bare name."""
    ours = {name: version for name, version in found.items() if name.startswith("tessera-")}
    assert ours == {distribution(name): VERSION for name in libraries}
    assert not found.keys() & {normal(name) for name in LIBRARIES}


def test_the_decoys_would_be_taken(index: Path, tmp_path: Path) -> None:
    """A requirement under a bare name finds the stranger's package: the index is one in which the mistake shows."""
    pip(["download", "-q", "--no-deps", "-d", "got", *LIBRARIES], tmp_path, index)
    assert sorted(path.name for path in (tmp_path / "got").iterdir()) == [
        f"{name}-1.0.0-py3-none-any.whl" for name in LIBRARIES
    ]


@pytest.mark.parametrize("library", EXAMPLES)
def test_it_installs_from_an_index_and_its_example_runs(library: str, index: Path, empty: Path, tmp_path: Path) -> None:
    """By its published name; siblings by the versions that its metadata pins."""
    beside = [BESIDE[library]] if library in BESIDE else []
    wanted = [distribution(library) + EXTRAS.get(library, ""), *map(distribution, beside)]
    if wanted != [distribution(library)]:
        alone = resolve([distribution(library)], tmp_path, index, empty)
        _check_ours(alone, {library, *ARROWS[library]})
    found = resolve(wanted, tmp_path, index, empty)
    libraries = {library, *ARROWS[library], *beside}
    _check_ours(found, libraries)
    wheels = [wheel_of(f"libs/{name}", VERSION) for name in sorted(libraries)]
    python = install(wheels, found, make_venv(tmp_path / "venv"), index)
    _run_example(library, str(python), tmp_path)


def _run_example(library: str, python: str, folder: Path) -> None:
    """The facade's names, then the Python blocks of the README as they stand, in a process that knows no tree."""
    readme = (ROOT / "libs" / library / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.M | re.S)
    assert blocks
    away = folder / "away"
    away.mkdir()
    script = away / "example.py"
    guarded = f"if __name__ == '__main__':\n    exec({CHECK!r})\n"
    script.write_text(guarded + GIVEN.get(library, "") + "\n".join(blocks))
    print(run([python, "-I", str(script), library, ",".join(LIBRARIES)], away))


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_readme_line_installs_it_from_the_tree(
    library: str, without_ours: Path, empty: Path, tmp_path: Path
) -> None:
    """The line that the library's README gives, as it stands, where an index has nothing of ours."""
    line = _readme_line(library)
    assert sorted(line) == sorted(f"./libs/{name}" for name in [*ARROWS[library], library])
    _copy(tmp_path, [library, *ARROWS[library]])
    # One case below has pip fetch the backend, as it does by itself.
    sites = [TOOLS / name / "site-packages" for name in BACKEND]
    _check_ours(resolve(line, tmp_path, without_ours, empty, *sites), {library, *ARROWS[library]})


def _readme_line(library: str) -> list[str]:
    (line,) = re.findall(r"pip install ((?:\./libs/\w+ ?)+)", (ROOT / "libs" / library / "README.md").read_text())
    return line.split()


def _copy(folder: Path, libraries: list[str]) -> None:
    for name in libraries:
        for file in ["pyproject.toml", "README.md", name]:
            source, goal = (ROOT / "libs" / name / file).resolve(), folder / "libs" / name / file
            goal.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, goal, copy_function=shutil.copyfile)
            else:
                shutil.copyfile(source, goal)


def test_a_tree_builds_with_what_it_asks_for(without_ours: Path, tmp_path: Path) -> None:
    """pip's own way: an environment for the build, with what build-system.requires names and nothing else."""
    _copy(tmp_path, ["seqpack"])
    pip(["wheel", "-q", "--no-deps", "-w", "dist", "./libs/seqpack"], tmp_path, without_ours)
    made = zipfile.ZipFile(next((tmp_path / "dist").iterdir()))
    published = zipfile.ZipFile(wheel_of("libs/seqpack", VERSION))
    for name in published.namelist():
        if ".dist-info/" not in name:
            assert made.read(name) == published.read(name), name


@pytest.mark.parametrize("library", LIBRARIES)
def test_extras_ask_for_what_the_tests_ran_with(library: str) -> None:
    """The locks hold each requirement of each extra at a version that it allows, so that none is a guess."""
    versions: dict[str, str] = {}
    for lock in ["openenv", "extras", "cpu"]:
        text = (ROOT / "build/locks" / f"{lock}.txt").read_text()
        versions |= {normal(name): version for name, version in re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.M)}
    with zipfile.ZipFile(wheel_of(f"libs/{library}", VERSION)) as wheel:
        (path,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        lines = re.findall(r"^Requires-Dist: (.*)$", wheel.read(path).decode(), re.M)
    for need in map(Requirement, lines):
        if need.name in UNTESTED or need.name.startswith("tessera-"):
            continue
        version = versions.get(normal(need.name))
        assert version is not None, f"{need}: no lock has it"
        assert need.specifier.contains(version, prereleases=True), f"{need}: the tests ran with {version}"
