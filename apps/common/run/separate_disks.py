"""Runs of several machines that share no disk: what one has and the others need, and which of them was the first.

The first rank's machine has the run directory: its configuration, metrics, ledger and report. The others keep their
shards of checkpoints, and copies of what a start needs, so that a run is resumed with its machines in another order.
Where all see one disk, nothing here does anything.
"""

import json
import shutil
from pathlib import Path

from apps.common.run.checkpoints import CHECKPOINTS, checkpoint_path, whole_checkpoints
from engines.storage.disks import Disks, find_disks, mirror_files, share_files
from engines.storage.manifest import MANIFEST, read_manifest
from schedules.runtime.collectives import gather_lists, rank_and_world

_PLACE = "machine.json"


def join_disks(run_dir: Path, resume: bool) -> Disks:
    """Return the disks that hold the run directory; on resume bring what the run needs to each of them. Collective.

    Raises:
        RuntimeError: a file can't be written.
        ValueError: the machines together have no whole checkpoint, though one of them has parts of one.
    """
    disks = find_disks(run_dir)
    if not disks.several:
        return disks
    places = gather_lists([_place(run_dir)])
    starts, source = max((start, -rank) for rank, (start, was_first) in enumerate(places) if was_first or not resume)
    if resume:
        mirror_files(run_dir, disks, -source, skip=[CHECKPOINTS, _PLACE])
        _settle(run_dir, disks)
    if disks.leads:
        first = disks.leaders[0] == disks.rank
        (run_dir / _PLACE).write_text(json.dumps({"start": starts + 1, "first": first}) + "\n")
    return disks


def _place(run_dir: Path) -> tuple[int, bool]:
    """Return the number of starts that this disk has seen, and whether it was the first rank's in the last."""
    try:
        place = json.loads((run_dir / _PLACE).read_text())
    except FileNotFoundError:
        return 0, False
    return place["start"], place["first"]


def _settle(run_dir: Path, disks: Disks) -> None:
    """Give every disk the newest checkpoint whose files the machines have together; delete what came after it."""
    parts = gather_lists([{step: _parts(path) for step, path in whole_checkpoints(run_dir)}])
    steps = sorted({step for own in parts for step in own}, reverse=True)
    for step in steps:
        held = [own[step] for own in parts if step in own]
        if held[0][0] <= {name for _, there in held for name in there}:
            share_files(checkpoint_path(run_dir, step), disks, hashed=False)
            return
        if disks.leads:
            shutil.rmtree(checkpoint_path(run_dir, step), ignore_errors=True)
        gather_lists([None])
    if steps and rank_and_world()[0] == 0:
        print(f"warning: no checkpoint in {run_dir} is whole on these machines: the run starts from its first step")


def _parts(checkpoint: Path) -> tuple[set[str], set[str]]:
    """Return the names of all files of a checkpoint, and of those that are on this disk."""
    return {*read_manifest(checkpoint)[1], MANIFEST}, {path.name for path in checkpoint.iterdir()}
