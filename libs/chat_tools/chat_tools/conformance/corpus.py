"""Chat templates of real models, fetched with pip: what the newest TRL, llama-cpp-python and vLLM hold.

Nothing of the packages is installed or run. `pip download` unpacks a source distribution to read its metadata; vLLM's
needs torch for that and fails, but leaves the sources where `--no-clean` asks for it. A folder that holds the sources
already is used as it is: delete it to fetch newer ones.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

# Each package, and how pip is asked for it.
PACKAGES: dict[str, tuple[str, ...]] = {
    "trl": ("--only-binary", ":all:"),
    "llama-cpp-python": ("--no-binary", ":all:"),
    "vllm": ("--no-binary", ":all:"),
}


def fetched_templates(folder: Path) -> list[Path]:
    """Return the chat templates of all packages, each text once, fetching into `folder` what is not there.

    ValueError for a package whose sources did not come.
    """
    found: dict[str, Path] = {}
    for package, kind in PACKAGES.items():
        place = folder / package
        if not any(place.rglob("*.jinja")):
            _fetch(package, kind, place)
        templates = sorted(place.rglob("*.jinja"))
        if not templates:
            raise ValueError(f"no chat template of {package} came to {place}: see {place / 'pip.log'}")
        for path in templates:
            if _is_chat(path):
                found.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
    return sorted(found.values())


def _is_chat(path: Path) -> bool:
    """Return whether a file is a template of conversations, and of no prompts for embeddings or scores."""
    return "messages" in path.read_text(encoding="utf-8", errors="replace")


def _fetch(package: str, kind: tuple[str, ...], place: Path) -> None:
    unpacked = place / "unpacked"
    unpacked.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-clean", *kind, "-d", str(place), package]
    with (place / "pip.log").open("w", encoding="utf-8") as log:
        environment = {**os.environ, "TMPDIR": str(unpacked.resolve())}
        subprocess.run(command, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False)
    for archive in place.glob("*.whl"):
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(unpacked, [name for name in wheel.namelist() if name.endswith(".jinja")])
    for archive in place.glob("*.tar.gz"):
        with tarfile.open(archive) as source:
            members = [member for member in source.getmembers() if member.isfile() and member.name.endswith(".jinja")]
            source.extractall(unpacked, members, filter="data")
