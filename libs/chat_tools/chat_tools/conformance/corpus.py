"""Files of other packages, fetched with pip: chat templates of real models, parsers, their tests.

Nothing of the packages is installed or built. pip can't just download a source distribution: it unpacks it and asks for
its metadata, which takes what it is built with; without isolation that is absent, pip gives up, and `--no-clean` leaves
what it unpacked. Files that are there are used as they are: delete the folder to fetch newer ones.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

# Each package, and how pip is asked for it: a wheel, or the source distribution.
PACKAGES = {"trl": "--only-binary", "llama-cpp-python": "--no-binary", "vllm": "--no-binary", "sglang": "--only-binary"}
TEMPLATES = {"trl": "trl/chat_templates", "llama-cpp-python": "vendor/llama.cpp/models/templates", "vllm": "."}


def fetched_templates(folder: Path | None) -> list[Path]:
    """Return the chat templates of the newest TRL, llama-cpp-python and vLLM, each text once; see `sources`."""
    by_digest: dict[str, Path] = {}
    for package, inside in TEMPLATES.items():
        for path in sorted((sources(package, folder) / inside).rglob("*.jinja")):
            if "messages" in path.read_text(encoding="utf-8", errors="replace"):  # not of embeddings or scores
                by_digest.setdefault(hashlib.sha256(path.read_bytes()).hexdigest(), path)
    return sorted(by_digest.values())


def sources(package: str, folder: Path | None) -> Path:
    """Return where a package's files lie: in `folder`, fetched where they are not there; on the path where it is None.

    On the path are those of a test's hub. ValueError for a package whose files did not come.
    """
    for place in map(Path, sys.path if folder is None else [folder]):
        if (tree := place / f"{package}-sources").is_dir():
            return tree
        if folder is None and PACKAGES[package] == "--only-binary" and (place / package).is_dir():
            return place
    if folder is None:
        raise ValueError(f"no files of {package} are on the path: name a folder to fetch them into")
    return _fetch(package, folder / f"{package}-sources")


def _fetch(package: str, tree: Path) -> Path:
    place = tree.with_name(f"{package}-pip")
    place.mkdir(parents=True, exist_ok=True)
    options = ["--no-deps", "--no-clean", "--no-build-isolation", PACKAGES[package], ":all:", "-d", str(place)]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    environment = {**os.environ, "TMPDIR": str(place.resolve())}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    for wheel in place.glob("*.whl"):
        zipfile.ZipFile(wheel).extractall(tree)
    for unpacked in place.glob("*/*/PKG-INFO"):
        unpacked.parent.rename(tree)
    shutil.rmtree(place)
    if not tree.exists():
        raise ValueError(f"pip brought no files of {package}: {done.stderr[-2000:]}")
    return tree
