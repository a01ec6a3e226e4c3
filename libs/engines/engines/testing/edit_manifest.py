"""Checkpoints with other facts than were written, for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.storage.manifest import MANIFEST, read_manifest, write_manifest


def edit_metadata(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let `change` alter the facts of a checkpoint in place, and drop from its manifest files that are gone."""
    metadata, files = read_manifest(checkpoint)
    change(metadata)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, metadata, {name: entry for name, entry in files.items() if (checkpoint / name).exists()})
