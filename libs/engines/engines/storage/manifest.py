"""The manifest of a checkpoint: its facts, and the size and SHA-256 of each of its files; written last.

A directory without one is no checkpoint. Reading checks the manifest against its own hash, then every file against the
manifest, before it does anything else with them: what is torn, missing or has a flipped bit is named.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

MANIFEST = "engine.json"
FORMAT = 1
_OWN = ("format", "files", "sha256")

Hashes = Mapping[str, Mapping[str, int | str]]
"""`bytes` and `sha256` by file name."""


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, dict[str, int | str]]:
    """Return size and hash of these files."""
    hashes: dict[str, dict[str, int | str]] = {}
    for name in names:
        with (directory / name).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        hashes[name] = {"bytes": (directory / name).stat().st_size, "sha256": digest}
    return hashes


def write_manifest(directory: Path, metadata: Mapping[str, Any], files: Hashes, here: Set[str] | None = None) -> None:
    """Write facts (plain JSON) and hashes. RuntimeError unless `here`, by default all `files`, are in the directory."""
    there, wanted = {path.name for path in directory.iterdir()}, files.keys() if here is None else here
    if there != wanted:
        raise RuntimeError(f"{directory}: nobody wrote or nobody hashed {sorted(there ^ wanted)}")
    content = {**metadata, "format": FORMAT, "files": dict(sorted(files.items()))}
    (directory / MANIFEST).write_text(json.dumps({**content, "sha256": _own_hash(content)}, indent=1) + "\n")


def read_manifest(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return facts and hashes; ValueError for a directory that is no checkpoint, or a manifest that is damaged."""
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{directory} is not a checkpoint of an engine: it has no {MANIFEST} (was the writer killed?)")
    try:
        content = dict(json.loads(path.read_bytes()))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): take another checkpoint") from error
    claimed = content.pop("sha256", None)
    if claimed is None:
        raise ValueError(f"{path} has no hash: it was written by an earlier version, which wrote none")
    if claimed != _own_hash(content):
        raise ValueError(f"{path} is damaged: it is not what its own hash says; take another checkpoint")
    if content["format"] != FORMAT:
        raise ValueError(f"{path} has format {content['format']}, this version reads {FORMAT}")
    return {key: value for key, value in content.items() if key not in _OWN}, content["files"]


def check_files(directory: Path, files: Hashes, names: Iterable[str]) -> str | None:
    """Compare these files with the manifest; return what is wrong with the first that differs, or None."""
    for name in names:
        path = directory / name
        if not path.is_file():
            return f"{path} is missing: copy the checkpoint again, or take another"
        size = path.stat().st_size
        if size != files[name]["bytes"]:
            return f"{path} has {size} bytes and had {files[name]['bytes']}: copy it again, or take another checkpoint"
        if hash_files(directory, [name])[name]["sha256"] != files[name]["sha256"]:
            return f"{path} is damaged (its SHA-256 has changed): copy it again, or take another checkpoint"
    return None


def _own_hash(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
