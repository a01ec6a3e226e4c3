"""Runs of several machines that share no disk: what one has and the others need, and which of them was the first.

The first rank's machine has the run directory: its configuration, metrics, ledger and report. The others keep their
shards of checkpoints, and copies of what a start needs, so that a run is resumed with its machines in another order.
Where all see one disk, nothing here does anything.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from apps.common.run.checkpoints import CHECKPOINTS, checkpoint_path, whole_checkpoints
from engines.storage.disks import Disks, find_disks, mirror_files, share_files
from engines.storage.manifest import MANIFEST, read_manifest
from schedules.runtime.collectives import gather_lists

_PLACE = "machine.json"


def join_disks(run_dir: Path, resume: bool) -> Disks:
    """Return the disks that hold the run directory; on resume bring what the run needs to each of them. Collective.

    Raises:
        RuntimeError: a file can't be written.
        ValueError: the machines together have no whole checkpoint, though one of them has parts of one; nothing is
            deleted.
    """
    disks = find_disks(run_dir)
    if not disks.several:
        return disks
    places = gather_lists([_place(run_dir)])
    starts = max(start for start, _ in places)
    if resume:  # a run of one machine or one disk left no such file: its first rank's directory counts
        source = max(((start, -rank) for rank, (start, first) in enumerate(places) if first), default=(0, 0))[1]
        _settle(run_dir, disks, starts)
        mirror_files(run_dir, disks, -source, skip=[CHECKPOINTS, _PLACE])
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


def _settle(run_dir: Path, disks: Disks, starts: int) -> None:
    """Give every disk the newest checkpoint whose files the machines have together; set aside what came after it."""
    parts = gather_lists([{step: _parts(path) for step, path in whole_checkpoints(run_dir)}])
    steps = sorted({step for own in parts for step in own}, reverse=True)
    lacks = {step: _lacking([own[step] for own in parts if step in own]) for step in steps}
    whole = next((step for step in steps if not lacks[step]), None)
    if steps and whole is None:
        files = ", ".join(sorted(lacks[steps[0]]))
        raise ValueError(
            f"{run_dir}: these machines lack {files} of the checkpoint of step {steps[0]}, and have no older one "
            "whole: resume with the machine that has them, or start anew in another --run-dir"
        )
    for step in steps[: steps.index(whole)] if whole is not None else ():
        path = checkpoint_path(run_dir, step)
        if disks.leads and path.exists():
            path.rename(path.with_name(f"{path.name}.incomplete-{starts}"))
    if whole is not None:
        share_files(checkpoint_path(run_dir, whole), disks, hashed=False)


def _lacking(held: Sequence[tuple[set[str], set[str]]]) -> set[str]:
    """Return the files of a checkpoint that none of the disks has."""
    return held[0][0] - {name for _, there in held for name in there}


def _parts(checkpoint: Path) -> tuple[set[str], set[str]]:
    """Return the names of all files of a checkpoint, and of those that are on this disk."""
    return {*read_manifest(checkpoint)[1], MANIFEST}, {path.name for path in checkpoint.iterdir()}
