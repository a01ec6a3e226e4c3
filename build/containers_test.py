"""The Containerfiles against the tree and the locks: what they copy, install, split and name is there.

Building one takes a network and 13 GB: build/proofs/container.sh.
"""

import re
import shutil
import subprocess
from pathlib import Path

import install_hub
import lock
import pytest

ROOT = Path(__file__).absolute().parents[1]
NAMES = ["cuda", "npu"]


def steps(name: str) -> list[tuple[str, str]]:
    """(Instruction, its words) of a Containerfile, lines that go on joined."""
    text = (ROOT / f"build/containers/{name}.Containerfile").read_text()
    lines = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", text, flags=re.M)).splitlines()
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines if line)]


@pytest.mark.parametrize("name", NAMES)
def test_it_installs_its_own_lock_with_hashes(name: str) -> None:
    (copied,) = [words.split() for step, words in steps(name) if step == "COPY" and not words.startswith(". ")]
    assert copied == [f"build/locks/recipes_{name}.txt", "/locks/"]
    assert (ROOT / copied[0]).is_file()
    assert f"recipes_{name}" in lock.HUBS
    installs = [words for step, words in steps(name) if step == "RUN" and "pip install" in words]
    assert installs
    assert all(words.endswith("&& pip check") for words in installs)
    for command in re.findall(r"pip install [^&]*", " ".join(installs)):
        assert "--no-deps --require-hashes" in command


@pytest.mark.parametrize("name", NAMES)
def test_it_has_every_library_on_its_path_and_starts_an_app(name: str) -> None:
    (path,) = [words.partition("=")[2] for step, words in steps(name) if words.startswith("PYTHONPATH=")]
    libraries = sorted(folder.parent.name for folder in (ROOT / "libs").glob("*/pyproject.toml"))
    assert len(libraries) == 9
    first, *others = path.split(":")
    assert (first, sorted(others)) == ("/tessera", [f"/tessera/libs/{library}" for library in libraries])
    (command,) = [words for step, words in steps(name) if step == "CMD"]
    assert command == '["python", "-m", "apps.grpo.main", "--recipe", "list"]'


def test_packages_without_wheels_are_split_from_the_rest(tmp_path: Path) -> None:
    """The commands of the file itself, run on the lock: what is built there is what the lock was checked without."""
    (commands,) = [words for step, words in steps("cuda") if step == "RUN" and "sources.txt" in words]
    split = [part.strip().replace("/locks/", "") for part in commands.split("&&") if part.strip().startswith("sed ")]
    shutil.copy(ROOT / "build/locks/recipes_cuda.txt", tmp_path)
    for command in split:
        subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True)
    whole, wheels, sources = (
        install_hub.lock_entries(tmp_path / f"{name}.txt") for name in ["recipes_cuda", "wheels", "sources"]
    )
    assert sources.keys() == lock.HUBS["recipes_cuda"].sources.keys()
    assert wheels | sources == whole
    assert not wheels.keys() & sources.keys()


def test_every_hub_has_its_source_and_its_lock() -> None:
    """So that a lock is one that the resolver made, for the Pythons that it says."""
    for name, hub in lock.HUBS.items():
        assert (ROOT / "build" / hub.source).is_file()
        made = (ROOT / f"build/locks/{name}.txt").read_text().splitlines()[0]
        assert made.endswith(f"from build/{hub.source}, for Python {', '.join(hub.pythons)}."), name
