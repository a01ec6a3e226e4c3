"""Schedules by name: three of this library, and those that others register."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from schedules.config import MODES, ScheduleConfig, builder_of
from schedules.fully_async.follower import AsyncFollower
from schedules.fully_async.fully_async import FullyAsyncSchedule
from schedules.one_step_off import OneStepOffSchedule
from schedules.protocols import Tasks, Trainer
from schedules.reporting.live import Show
from schedules.runtime.collectives import rank_and_world
from schedules.runtime.interrupts import Runner
from schedules.sampling.sampler_process import StartSampling
from schedules.sampling.session import RolloutSession
from schedules.sampling.settings import RunState
from schedules.schedule import Schedule
from schedules.sync import SyncSchedule
from seqpack.extensions.load_object import is_user_code
from seqpack.extensions.options import bound

METHODS = ("__enter__", "__exit__", "step", "evaluate", "saving", "saved")


@dataclass(frozen=True)
class ScheduleParts:
    """Everything that a schedule may be built of.

    `session` samples in this process, or by Ray's actors, between and beside steps; None where `start` starts what
    samples.
    """

    config: ScheduleConfig
    tasks: Tasks
    trainer: Trainer
    run: RunState
    runner: Runner
    session: RolloutSession | None = None
    start: StartSampling | None = None
    show: Show | None = field(default=None, repr=False)

    @property
    def sampled_here(self) -> RolloutSession:
        """The session. ValueError: there is none."""
        if self.session is None:
            raise ValueError(f"schedule {self.config.mode!r} needs a session that samples in the run's own processes")
        return self.session


def _fully_async(parts: ScheduleParts) -> Schedule:
    if rank_and_world()[0]:
        return AsyncFollower(parts.tasks, parts.trainer, parts.run, parts.runner)
    if parts.start is None:
        raise ValueError("schedule 'fully_async' needs `start`, which starts what samples: StartProcess, or StartPool")
    return FullyAsyncSchedule(
        parts.config, parts.tasks, parts.trainer, parts.start, parts.run, parts.runner, parts.show
    )


BuildSchedule = Callable[[ScheduleParts], Schedule]
_SCHEDULES: dict[str, BuildSchedule] = {
    "sync": lambda parts: SyncSchedule(parts.sampled_here, parts.trainer, parts.run),
    "one_step_off": lambda parts: OneStepOffSchedule(parts.sampled_here, parts.trainer, parts.run),
    "fully_async": _fully_async,
}


def register_schedule(name: str, build: BuildSchedule) -> None:
    """Let `ScheduleConfig(mode=name)` stand for what `build` returns.

    Raises:
        ValueError: there is a schedule of that name.
    """
    if name in _SCHEDULES:
        raise ValueError(f"there is a schedule {name!r} already: choose another name")
    _SCHEDULES[name] = build
    MODES.append(name)


def build_schedule(parts: ScheduleParts) -> Schedule:
    """Return the schedule that `parts.config.mode` names.

    Raises:
        ValueError: nobody has registered that name, or a part is missing.
    """
    config = parts.config
    if is_user_code(config.mode):
        return _checked(config.mode, builder_of(config.mode, config.options)(parts))
    if config.mode not in _SCHEDULES:
        raise ValueError(f"no schedule {config.mode!r}; there are {', '.join(_SCHEDULES)}")
    made: Schedule = bound("options", config.mode, _SCHEDULES[config.mode], config.options, first=1)(parts)
    return made


def _checked(spec: str, schedule: Any) -> Schedule:
    """Return a user's schedule; ValueError where it lacks a method."""
    missing = [name for name in METHODS if not callable(getattr(schedule, name, None))]
    if missing:
        raise ValueError(
            f"the schedule {spec} gave a {type(schedule).__name__} without {', '.join(missing)}: a schedule is a "
            f"context manager with {', '.join(METHODS[2:])} (schedules.schedule.Schedule)"
        )
    made: Schedule = schedule
    return made
