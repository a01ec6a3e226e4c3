"""Where a fully asynchronous run stands: what bounds it, and what its ledger says once it goes on."""

from rollout.control.settings import StalenessSettings
from rollout.control.staleness import ControlState, StartedGroup
from rollout.ledger.state import LedgerState
from schedules.config import ScheduleConfig


def staleness_settings(schedule: ScheduleConfig, groups_per_step: int, total_steps: int) -> StalenessSettings:
    """Return the bounds of a fully asynchronous run."""
    return StalenessSettings(
        groups_per_step=groups_per_step,
        total_steps=total_steps,
        staleness_threshold=schedule.stale_share,
        parameter_sync_step=schedule.parameter_sync_step,
        required_batches=schedule.required_batches,
        partial_rollout=schedule.interrupts,
    )


def weights_due(settings: StalenessSettings, step: int) -> bool:
    """Return whether the samplers get the weights that `step` steps have made: a window ends there, or the run."""
    return step % settings.parameter_sync_step == 0 or step == settings.total_steps


def resume_version(settings: StalenessSettings, step: int) -> int:
    """Return the number under which the samplers have the weights of `step` steps, from which a run goes on.

    Inside a window it is that of the window before, also where an earlier run ended there and had counted further: the
    controller's next number is that of the window's end. The weights are no older than it says.
    """
    return settings.version_of(_synced(settings, step))


def control_state(settings: StalenessSettings, state: LedgerState, done: int) -> ControlState:
    """Return where a run goes on from a checkpoint of `done` steps, once the recorded steps after it are trained
    again."""
    step = done + len(state.batches)
    ready = [StartedGroup(g, group.version) for g, group in state.sampled.items() if g not in state.taken]
    return ControlState(step, _synced(settings, step), state.next, tuple(state.missing()), (), tuple(ready))


def _synced(settings: StalenessSettings, step: int) -> int:
    """Return the steps whose weights count as the samplers'."""
    return step if weights_due(settings, step) else step - step % settings.parameter_sync_step
