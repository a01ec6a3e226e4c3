"""The wheels and sdists that Bazel builds: what is in them, and that the same files give the same bytes anywhere."""

import email.parser
import os
import random
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Callable
from email.message import Message
from pathlib import Path

import pytest
from shipped import files

HERE = Path(__file__).absolute().parent
ROOT = HERE.parent
LIBRARIES = ["seqpack", "dyncp", "chat_tools", "objectives", "engines", "rollout", "runlog", "runplan", "schedules"]
PYTHONS = {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)}  # what the locks hold for
(HOME,) = re.findall(r'^HOME = "(.*)"$', (HERE / "version.bzl").read_text(), re.M)
APPS_FILES = ("README.md", "__init__.py", "hatch_build.py", "pyproject.toml")
PAGES = {"Homepage": "README.md", "Documentation": "docs/architecture.md", "Changelog": "CHANGELOG.md"}


def built(library: str, end: str) -> Path:
    """The one artifact of a library that Bazel built."""
    (path,) = (ROOT / "libs" / library).glob(f"tessera_{library}-*{end}")
    return path


def sources(library: str) -> set[str]:
    """Its files that are shipped, by their paths below its folder."""
    return files(ROOT, library)[0]


def metadata(wheel: zipfile.ZipFile) -> Message:
    """What the wheel says of itself."""
    (name,) = [name for name in wheel.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
    return email.parser.Parser().parsestr(wheel.read(name).decode())


def urls(home: str) -> list[str]:
    """The Project-URL lines of a wheel; none where the tree has no home."""
    return [f"{label}, {home}/{page}" for label, page in PAGES.items()] if home else []


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_wheel_holds_the_library_and_no_tests(library: str) -> None:
    wanted = sources(library)
    assert f"{library}/py.typed" in wanted
    with zipfile.ZipFile(built(library, ".whl")) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
        about = metadata(wheel)
        assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())
    assert names == wanted
    assert not [name for name in names if name.endswith("_test.py") or "__pycache__" in name]
    assert about["Name"] == "tessera-" + library.replace("_", "-")
    assert about["License-Expression"] == "Apache-2.0"
    assert about["Requires-Python"] == ">=3.11"
    classifiers = about.get_all("Classifier")
    assert "Typing :: Typed" in classifiers
    assert {name for name in classifiers if re.search(r":: 3\.\d+$", name)} == PYTHONS
    assert about.get_all("Project-URL", []) == urls(HOME)
    assert f"# {library}" in about.get_payload()


@pytest.mark.parametrize("library", LIBRARIES)
def test_the_sdist_holds_the_same(library: str) -> None:
    with tarfile.open(built(library, ".tar.gz")) as archive:
        members = archive.getmembers()
    assert {member.mode for member in members} == {0o644}
    assert {(member.uid, member.gid, member.uname) for member in members} == {(0, 0, "")}
    names = {member.name.split("/", 1)[1] for member in members}
    assert names - sources(library) == {"PKG-INFO", "pyproject.toml", "README.md", "LICENSE"}
    assert sources(library) <= names


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_built_elsewhere_in_another_order_it_has_the_same_bytes(kind: str, tmp_path: Path) -> None:
    """Other folder, modes, times, order, time zone, mask and seed of hashes; and with the tests beside the code."""
    library = "chat_tools"
    first = built(library, ".whl" if kind == "wheel" else ".tar.gz")
    shipped, left_out = files(ROOT, library)
    assert left_out  # what the build has to leave out wherever it lies
    names = sorted(shipped | left_out | {"pyproject.toml", "README.md"})
    again = built_elsewhere(
        kind, first.name, ROOT / "libs" / library, names, f"{library}/parsing/planted_test.py", tmp_path
    )
    assert again.read_bytes() == first.read_bytes()


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_so_do_the_apps_which_have_other_names_in_their_wheel(kind: str, tmp_path: Path) -> None:
    (first,) = (ROOT / "apps").glob("*.whl" if kind == "wheel" else "*.tar.gz")
    names = [str(path.relative_to(ROOT / "apps")) for path in (ROOT / "apps").rglob("*") if path.is_file()]
    names = [name for name in names if "/" in name or name in APPS_FILES]
    again = built_elsewhere(kind, first.name, ROOT / "apps", names, "grpo/planted_test.py", tmp_path)
    assert again.read_bytes() == first.read_bytes()


def built_elsewhere(kind: str, name: str, root: Path, names: list[str], planted: str, folder: Path) -> Path:
    """Copy files to another folder with another mode and time, add a test, and build them in another order."""
    copies = []
    for one in names:
        copy = folder / "elsewhere" / one
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes((root / one).read_bytes())
        copy.chmod(0o600)
        os.utime(copy, (1e9, 1e9))
        copies.append(str(copy))
    (folder / "elsewhere" / planted).write_text("assert False\n")
    copies.append(str(folder / "elsewhere" / planted))
    random.Random(7).shuffle(copies)
    out = folder / name
    command = [sys.executable, str(HERE / "dist.py"), "--kind", kind, "--root", str(folder / "elsewhere")]
    command += ["--out", str(out), *(["--home", HOME] if HOME else []), *copies, str(ROOT / "LICENSE")]
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TZ": "Asia/Tokyo",
        "SOURCE_DATE_EPOCH": "1700000000",
        "PYTHONHASHSEED": "11",
    }
    done = subprocess.run(command, env=env, umask=0o077, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out


def tiny_builder(library: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Write a library of one file, version 1.2.3. Returns what builds its wheel under the name of a version."""
    (library / "tiny").mkdir(parents=True)
    (library / "tiny/__init__.py").write_text('__version__ = "1.2.3"\n')
    (library / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["hatchling"]\nbuild-backend = "hatchling.build"\n'
        '[project]\nrequires-python = ">=3.11"\nname = "tessera-tiny"\ndynamic = ["version"]\n'
        '[tool.hatch.version]\npath = "tiny/__init__.py"\n'
        '[tool.hatch.build.targets.wheel]\npackages = ["tiny"]\n'
    )
    command = [sys.executable, str(HERE / "dist.py"), "--kind", "wheel", "--root", str(library)]
    files = [str(library / "tiny/__init__.py"), str(library / "pyproject.toml")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}

    def run(version: str, *options: str) -> subprocess.CompletedProcess[str]:
        out = ["--out", str(library.parent / f"tessera_tiny-{version}-py3-none-any.whl"), *options]
        return subprocess.run([*command, *out, *files], env=env, capture_output=True, text=True, check=False)

    return run


def test_another_version_than_bazels_is_refused(tmp_path: Path) -> None:
    """The name of the file is Bazel's, the version in it the library's."""
    run = tiny_builder(tmp_path / "tiny")
    assert run("1.2.3").returncode == 0
    refused = run("1.2.4")
    assert refused.returncode != 0
    assert "//build:version" in refused.stderr


def test_a_home_gives_the_wheel_its_addresses(tmp_path: Path) -> None:
    run = tiny_builder(tmp_path / "tiny")
    assert run("1.2.3", "--home", "https://tessera.invalid/tree").returncode == 0
    with zipfile.ZipFile(tmp_path / "tessera_tiny-1.2.3-py3-none-any.whl") as wheel:
        assert metadata(wheel).get_all("Project-URL") == urls("https://tessera.invalid/tree")
    assert all((ROOT / page).is_file() for page in PAGES.values())


@pytest.mark.parametrize("home", ["tessera.invalid", "https://tessera.invalid/", 'https://tessera.invalid/"'])
def test_what_is_no_home_is_refused(home: str, tmp_path: Path) -> None:
    refused = tiny_builder(tmp_path / "tiny")("1.2.3", "--home", home)
    assert refused.returncode != 0
    assert "HOME of build/version.bzl" in refused.stderr
