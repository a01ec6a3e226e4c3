"""Checkpoints with other facts than were written, for tests."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.storage.manifest import MANIFEST, read_manifest, write_manifest


def edit_facts(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Let `change` alter the facts of a checkpoint in place, and drop from its manifest files that are gone."""
    facts, files = read_manifest(checkpoint)
    change(facts)
    (checkpoint / MANIFEST).unlink()
    write_manifest(checkpoint, facts, {name: entry for name, entry in files.items() if (checkpoint / name).exists()})
