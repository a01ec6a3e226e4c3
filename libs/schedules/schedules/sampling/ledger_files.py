"""Which ledgers of sampled answers a run's folder holds: by which schedule, and on how many ranks, it goes on."""

from collections.abc import Sequence
from pathlib import Path

from schedules.config import Mode
from schedules.runtime.collectives import broadcast_result

SHARED = "ledger.bin"
"""Of fully_async, in the run's folder."""
PER_RANK = "ledger-{}.bin"
"""Of a rank of one_step_off."""


def check_ledgers(run_dir: Path, mode: Mode, world: int, done: int) -> None:
    """Refuse to go on without the answers that another schedule, or other ranks, have sampled ahead; collective.

    `done`: steps that the checkpoint holds which the run goes on from.

    Raises:
        ValueError: it says how the run goes on.
    """
    names = broadcast_result(sorted(path.name for path in run_dir.glob("ledger*.bin")))
    if (why := refusal(names, mode, world, done)) is not None:
        raise ValueError(why)


def refusal(names: Sequence[str], mode: Mode, world: int, done: int) -> str | None:
    """Return why a run of these ledgers can't go on by a schedule on so many ranks, and how it can; None where it
    can."""
    wanted: dict[Mode, list[str]] = {
        "sync": [],
        "one_step_off": sorted(PER_RANK.format(rank) for rank in range(world)),
        "fully_async": [SHARED],
    }
    if sorted(names) == sorted(wanted[mode]) or not (names or done):
        return None
    lost = f"{', '.join(name for name in wanted[mode] if name not in names)} was deleted"
    if not names:
        return (
            "this run's folder has no ledger: either it was begun under sync (go on with --schedule.mode sync), or "
            f"{lost}: put it back, or begin a new run from its export (--model)"
        )
    before: Mode = "fully_async" if SHARED in names else "one_step_off"
    if before != mode:
        return (
            f"this run was begun under another schedule, and a checkpoint of {before} does not say what {mode} has "
            f"sampled ahead: go on with --schedule.mode {before}, or begin a new run from its export (--model)"
        )
    if set(names) != {PER_RANK.format(rank) for rank in range(len(names))}:
        return f"{lost}: put it back, or begin a new run from its export (--model)"
    unless = f", unless {lost}: then put it back" if len(names) < world else ""
    return (
        f"this run has {len(names)} ranks, and the answers that each sampled ahead are in its ledger{unless}: go on "
        f"with --nproc-per-node {len(names)}, not {world}"
    )
