"""Makes the lock files again: `./bazelw run //build:lock` (all) or `./bazelw run //build:lock -- tf517` (one).

Each source of HUBS becomes a lock with the hashes of every file of each pinned version, so that it serves all platforms
of the wheels. A lock for CPUs is the same resolution less the CUDA libraries, and it lists as well the hash of
the torch build that this machine's pip prefers (a local +cpu wheel), besides those it listed before.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

from install_hub import lock_entries

UV = "uv==0.13.8"  # the resolver
PYTHON = "3.11"
CUDA_ONLY = re.compile(r"(nvidia-.*|cuda-.*|triton)$")


@dataclass(frozen=True)
class Hub:
    """One lock file: where its wishes stand, whether the CUDA libraries stay in, and whether only files are wanted."""

    source: str
    cuda: bool = False
    data_only: bool = False  # the packages alone, for files in them; what they would need to run is left out


HUBS = {
    "cpu": Hub("requirements.in"),
    "cuda": Hub("requirements.in", cuda=True),
    "tf517": Hub("requirements_tf517.in"),
    "templates": Hub("requirements_templates.in", data_only=True),
}


def resolve(uv: Path, source: Path, data_only: bool) -> dict[str, str]:
    """Lock entries with all hashes; no comment and no registry's name among them."""
    target = ["--python-version", PYTHON, "--python-platform", "x86_64-unknown-linux-gnu"]
    plain = ["--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--no-config"]
    alone = ["--no-deps"] if data_only else []
    command = [str(uv), "pip", "compile", "-q", *target, *plain, *alone, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{source.name} cannot be resolved:\n{done.stderr}")
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
        file.write(done.stdout)
        file.flush()
        return lock_entries(Path(file.name))


def hashes(entry: str) -> list[str]:
    """The sha256 sums of a lock entry."""
    return re.findall(r"sha256:([0-9a-f]{64})", entry)


def preferred_build(pip: list[str], pinned: str) -> str:
    """The sha256 of the wheel that this machine's pip chooses by itself."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*pip, "download", "-q", "--no-deps", "--only-binary=:all:", "-d", folder, pinned], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        return hashlib.sha256(wheel.read_bytes()).hexdigest()


def with_local_builds(entry: str, before: str, preferred: str) -> str:
    """A lock entry that also lists the builds accepted before and the one preferred here."""
    pinned = entry.split()[0]
    kept = hashes(before) if before.split()[:1] == [pinned] else []
    every = list(dict.fromkeys([*hashes(entry), *kept, preferred]))
    return pinned + "".join(f" \\\n    --hash=sha256:{digest}" for digest in every) + "\n"


def write_lock(path: Path, hub: Hub, entries: dict[str, str], pip: list[str]) -> None:
    """Writes one lock file."""
    if not hub.cuda:
        entries = {name: text for name, text in entries.items() if not CUDA_ONLY.match(name)}
    if not hub.cuda and "torch" in entries:
        before = lock_entries(path).get("torch", "") if path.exists() else ""
        pinned = entries["torch"].split()[0]
        entries["torch"] = with_local_builds(entries["torch"], before, preferred_build(pip, pinned))
    path.write_text(f"# Made by `./bazelw run //build:lock` from build/{hub.source}.\n" + "".join(entries.values()))
    print(f"build/locks/{path.name}: {len(entries)} packages")


def main(names: list[str]) -> None:
    """Makes the named locks, or all."""
    unknown = sorted(set(names) - HUBS.keys())
    if unknown:
        sys.exit(f"no lock is called {', '.join(unknown)}; there are {', '.join(HUBS)}")
    build = Path(os.environ.get("BUILD_WORKSPACE_DIRECTORY", Path.cwd())) / "build"
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [f"{folder}/bin/python", "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "-q", UV], check=True)
        for name in names or HUBS:
            hub = HUBS[name]
            entries = resolve(Path(folder) / "bin/uv", build / hub.source, hub.data_only)
            write_lock(build / "locks" / f"{name}.txt", hub, entries, pip)


if __name__ == "__main__":
    main(sys.argv[1:])
