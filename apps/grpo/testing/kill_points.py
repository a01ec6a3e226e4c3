"""The named points at which tests kill a run, by the role of the process that ends there.

The driver (rank 0) decides and records. The worker samples outside of it: the process of a fully async run, or one of
Ray's actors in any schedule. A rank trains beside it and is not the first. A role arms its points in its own process,
where the run's tasks arrive (`testing.schedules.SampledTasks`, `testing.ranks.PreparedTasks`).
"""

import functools
from collections.abc import Mapping
from pathlib import Path

from apps.common.testing.process_kills import KillPoint
from apps.grpo.testing.schedules import Prepare

Points = Mapping[str, KillPoint]

_LEDGER = "rollout.ledger.ledger:RolloutLedger"
_SENDER = "rollout.workers.process:WorkerProcess"
_RECEIVER = "rollout.native.engine:NativeEngine"
_GENERATOR = "schedules.sampling.sampler_process"
_FOLLOWING = "schedules.fully_async.follower"
_CHECKPOINT = "engines.storage.checkpoint:_write_own"

DRIVER = {
    "a group before it is recorded as issued": KillPoint(f"{_LEDGER}.started", "before", 6),
    "a group after it is recorded as issued": KillPoint(f"{_LEDGER}.started", "after", 6),
    "a group before it is recorded": KillPoint(f"{_LEDGER}.finished", "before", 7),
    "a group after it is recorded": KillPoint(f"{_LEDGER}.finished", "after", 10),
    "a step before it is recorded": KillPoint(f"{_LEDGER}.train", "before", 3),
    "a step after it is recorded": KillPoint(f"{_LEDGER}.train", "after", 3),
    "a step before it is trained": KillPoint("apps.grpo.step:train_on", "before", 3),
    "a step after it is trained": KillPoint("apps.grpo.step:train_on", "after", 3),
    "a checkpoint before the place of its tasks is": KillPoint(
        "schedules.fully_async.fully_async:save_cursor", "before"
    ),
    "a checkpoint amid its writing": KillPoint(_CHECKPOINT, "before"),
    "a checkpoint before it is recorded": KillPoint(f"{_LEDGER}.saved", "before"),
    "a checkpoint after it is recorded": KillPoint(f"{_LEDGER}.saved", "after"),
    "weights before they are announced": KillPoint(f"{_SENDER}.prepare", "before", 2),
    "amid a transfer of weights": KillPoint(f"{_SENDER}.receive", "before", 2),
    "weights between prepare and commit": KillPoint(f"{_SENDER}.commit", "before", 2),
    "weights after the commit": KillPoint(f"{_SENDER}.commit", "after", 2),
    "weights before it knows of the proof": KillPoint(f"{_FOLLOWING}:compare_checks", "before", 2),
}
"""Of a fully asynchronous run with a process that samples."""

WORKER = {
    "while it begins": KillPoint(f"{_GENERATOR}:_ending_with"),
    "amid the held-out answers": KillPoint(f"{_GENERATOR}:encode_episodes"),
    "a group before it is sampled": KillPoint("schedules.sampling.session:RolloutSession.rollout_groups", "before", 6),
    "amid generation": KillPoint("rollout.native.scheduler.batch:ContinuousBatch.step", "before", 24),
    "a group before it is written down": KillPoint(f"{_GENERATOR}:encode_episodes", "before", 6),
    "a group before it is sent": KillPoint("rollout.workers.channel:Channel.send", "before", 8),
    "a group after it is sent": KillPoint("rollout.workers.channel:Channel.send", "after", 8),
    "weights before they are announced": KillPoint(f"{_RECEIVER}.prepare", "before"),
    "weights before a bucket is taken": KillPoint(f"{_RECEIVER}.receive", "before"),
    "weights between prepare and commit": KillPoint(f"{_RECEIVER}.receive", "after"),
    "weights before the commit": KillPoint(f"{_RECEIVER}.commit", "before"),
    "weights after the commit": KillPoint(f"{_RECEIVER}.commit", "after"),
    "weights before the old ones are let go": KillPoint(f"{_RECEIVER}.resume", "before"),
    "weights after the old ones are let go": KillPoint(f"{_RECEIVER}.resume", "after"),
    "weights before they are proven": KillPoint(f"{_GENERATOR}:sample_checks", "before"),
    "weights after they are proven": KillPoint(f"{_GENERATOR}:sample_checks", "after"),
}
"""Of the process that samples for a fully asynchronous run, by the native engine."""

ACTOR = {name: point for name, point in WORKER.items() if "Channel" not in point.function}
"""Of one of Ray's actors, in any schedule: it answers by Ray's own way."""

RANK = {
    "a step before it is trained": KillPoint("apps.grpo.step:train_on", "before", 3),
    "a step after it is trained": KillPoint("apps.grpo.step:train_on", "after", 3),
    "weights before they are exported": KillPoint(f"{_FOLLOWING}:sync_weights", "before", 2),
    "weights after they are exported": KillPoint(f"{_FOLLOWING}:sync_weights", "after", 2),
    "weights before they are proven": KillPoint(f"{_FOLLOWING}:compare_checks", "before", 2),
    "weights after they are proven": KillPoint(f"{_FOLLOWING}:compare_checks", "after", 2),
    "a checkpoint before it begins": KillPoint("apps.common.run.checkpoint_saver:CheckpointSaver.begin", "before"),
    "a checkpoint amid its writing": KillPoint(_CHECKPOINT, "before"),
    "a checkpoint after its part is written": KillPoint(_CHECKPOINT, "after"),
    "held-out answers before they are heard": KillPoint(f"{_FOLLOWING}:evaluation_of", "before", 2),
}
"""Of a rank of a fully asynchronous run that is not the first."""

RANK_AHEAD = {
    "answers before they are recorded as asked for": KillPoint(f"{_LEDGER}.started", "before", 3),
    "answers before they are recorded": KillPoint(f"{_LEDGER}.finished", "before", 3),
    "answers after they are recorded": KillPoint(f"{_LEDGER}.finished", "after", 3),
    "a step before it is recorded": KillPoint(f"{_LEDGER}.train", "before", 3),
    "a step before it is trained": KillPoint("apps.grpo.step:train_on", "before", 3),
    "a step after it is trained": KillPoint("apps.grpo.step:train_on", "after", 3),
    "weights before they are handed over": KillPoint("schedules.sampling.session:sync_weights", "before", 3),
    "weights after they are handed over": KillPoint("schedules.sampling.session:sync_weights", "after", 3),
    "a checkpoint amid its writing": KillPoint(_CHECKPOINT, "before"),
    "a checkpoint after its part is written": KillPoint(_CHECKPOINT, "after"),
    "a checkpoint before it is recorded": KillPoint(f"{_LEDGER}.saved", "before"),
    "a checkpoint after it is recorded": KillPoint(f"{_LEDGER}.saved", "after"),
}
"""Of a rank that is not the first, one step behind: it samples too, and has a ledger of its own."""

RANK_IN_TURN = {
    "amid generation": KillPoint("rollout.native.scheduler.batch:ContinuousBatch.step", "before", 40),
    "a step before it is trained": KillPoint("apps.grpo.step:train_on", "before", 3),
    "a step after it is trained": KillPoint("apps.grpo.step:train_on", "after", 3),
    "weights before they are handed over": KillPoint("schedules.sampling.session:RolloutSession.sync", "before", 3),
    "weights after they are handed over": KillPoint("schedules.sampling.session:RolloutSession.sync", "after", 3),
} | {name: point for name, point in RANK_AHEAD.items() if point.function == _CHECKPOINT}
"""The same in turn."""

RANK_POINTS: dict[str, Points] = {"sync": RANK_IN_TURN, "one_step_off": RANK_AHEAD, "fully_async": RANK}
"""Of a rank that is not the first, by schedule."""


def kill_at_points(run_dir: Path, points: Points, *names: str) -> Prepare:
    """Return what to prepare a role's processes with: the first ends at the first point, its successor at the second,
    ..."""
    return functools.partial(_arm, [(points[name], _told(run_dir, name)) for name in names])


def ended_at(run_dir: Path, *names: str) -> list[str]:
    """Return the points at which a process has ended."""
    return [name for name in names if _told(run_dir, name).exists()]


def _arm(points: list[tuple[KillPoint, Path]]) -> None:
    for point, once in points:
        if not once.exists():
            point.arm(once)
            return


def _told(run_dir: Path, name: str) -> Path:
    return run_dir.parent / f"{run_dir.name} {name}".replace(" ", "-")
