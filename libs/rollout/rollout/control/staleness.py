"""Which groups begin, what is trained and when weights are synced, as a pure state machine: events in, decisions out.

Groups are numbered 0, 1, ... in the order of the run's tasks. The rules, with B groups a step, W a window, v the
version of the samplers' weights and `ahead` groups of slack (`StalenessSettings`):

1. A group begins while fewer than (1 + v) W + ahead groups are trained or in progress: others wait. One that ended
   without signal is neither, so that the next group takes its place; no other is ever dropped. A group that failed
   begins again, under its number, with the weights of that time.
2. A step takes the B finished groups that began first. It waits as long as a group that is still sampled, or one
   that would be left over, could then not be trained within the bound (earliest deadline first).
3. After `parameter_sync_step` steps, and after the last, weights are synced: with `partial_rollout` at once,
   interrupting what runs, else once nothing runs. Nothing begins and nothing is trained until the samplers have them.
   A weight sync that failed is asked for again.

Invariants, held by an exhaustive search and a stateful test: a group with signal is trained exactly once, with a
staleness of at most `bound`; every group that may begin has begun; the run never deadlocks.

Why rule 2 never waits in vain: up to the end of window v at most (1 + v) W + ahead groups have begun, and until the end
of window v + bound as many are trained, since bound W >= ahead. So serving them in order of their beginning keeps every
deadline, and a batch may run ahead of that order only as far as the deadlines stay possible.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

from rollout.control.settings import StalenessSettings

Phase = Literal["open", "draining", "syncing"]


@dataclass(frozen=True)
class Finished:
    """All completions of a group are there."""

    group: int


@dataclass(frozen=True)
class NoSignal:
    """All completions of a group are there, and nothing of it is trained: another group takes its place."""

    group: int


@dataclass(frozen=True)
class Failed:
    """A group failed with its sampler and must begin again. A task that cannot be played is finished, not failed."""

    group: int


@dataclass(frozen=True)
class Trained:
    """The running step is done."""


@dataclass(frozen=True)
class Synced:
    """All samplers have the new weights."""


@dataclass(frozen=True)
class SyncFailed:
    """All samplers still have the old weights."""


Event = Finished | NoSignal | Failed | Trained | Synced | SyncFailed


@dataclass(frozen=True)
class Begin:
    """Command to sample this group with the samplers' present weights, `version`."""

    group: int
    version: int


@dataclass(frozen=True)
class Train:
    """Command to train step `step`, from 1, on these groups; `staleness` is the largest of them."""

    step: int
    groups: tuple[int, ...]
    staleness: int


@dataclass(frozen=True)
class Sync:
    """Command to sync weights as `version`; with `interrupt` running completions then continue from their tokens."""

    version: int
    interrupt: bool


Decision = Begin | Train | Sync


@dataclass(frozen=True)
class StartedGroup:
    """A group in progress: its number, and the version of the weights that sampled its first token."""

    group: int
    version: int


@dataclass(frozen=True)
class ControlState:
    """State of a run. A group below `next` is trained, without signal, or in one of `again`, `running`, `ready`,
    `training`."""

    step: int = 0
    """Number of finished steps."""
    synced: int = 0
    """Number of steps whose weights the samplers have."""
    next: int = 0
    """The lowest group number that never began."""
    again: tuple[int, ...] = ()
    running: tuple[StartedGroup, ...] = ()
    ready: tuple[StartedGroup, ...] = ()
    training: tuple[StartedGroup, ...] = ()
    phase: Phase = "open"

    @property
    def under_way(self) -> int:
        """Number of groups that have begun and may be trained."""
        return len(self.running) + len(self.ready) + len(self.training)


@dataclass
class StalenessController:
    """The state machine and its state: `begin()` once, then `handle(event)`; both return the decisions for now.

    Decisions are commands, in order: the caller obeys each, and reports its end by an event.
    """

    settings: StalenessSettings
    state: ControlState = field(default_factory=ControlState)

    def begin(self) -> tuple[Decision, ...]:
        """Return the decisions in the present state of a new run, or one that is resumed."""
        self.state, decisions = decide(self.settings, self.state)
        return decisions

    def handle(self, event: Event) -> tuple[Decision, ...]:
        """Apply an event and return the decisions that follow. Raise ValueError for one that cannot have happened."""
        self.state = after(self.state, event)
        return self.begin()

    @property
    def version(self) -> int:
        """The version of the samplers' weights."""
        return self.settings.version_of(self.state.synced)

    @property
    def done(self) -> bool:
        """Whether every step is trained and its weights synced."""
        return self.state.synced == self.settings.total_steps

    @property
    def staleness(self) -> int:
        """Staleness of the oldest group in progress, in weight syncs."""
        state = self.state
        versions = [group.version for group in (*state.running, *state.ready, *state.training)]
        return self.version - min(versions, default=self.version)


def after(state: ControlState, event: Event) -> ControlState:
    """Return the state after an event, before any decision."""
    match event:
        case Finished(group):
            ended, rest = _without(state.running, group)
            return replace(state, running=rest, ready=(*state.ready, ended))
        case NoSignal(group):
            return replace(state, running=_without(state.running, group)[1])
        case Failed(group):
            ended, rest = _without(state.running, group)
            return replace(state, running=rest, again=(*state.again, group))
        case Trained():
            if not state.training:
                raise ValueError("no step is under way: nothing can be trained")
            return replace(state, step=state.step + 1, training=())
    if state.phase != "syncing":
        raise ValueError(f"no weights are under way: {type(event).__name__} cannot have happened")
    return replace(state, phase="open", synced=state.step if isinstance(event, Synced) else state.synced)


def decide(settings: StalenessSettings, state: ControlState) -> tuple[ControlState, tuple[Decision, ...]]:
    """Return the state after all decisions that the rules allow now, and these decisions."""
    made: list[Decision] = []
    if state.phase != "syncing" and not state.training and _sync_due(settings, state):
        if state.running and not settings.partial_rollout:
            return replace(state, phase="draining"), ()
        state = replace(state, phase="syncing")
        return state, (Sync(settings.version_of(state.step), bool(state.running)),)
    if state.phase != "open":
        return state, ()
    if not state.training and (batch := _next_batch(settings, state)):
        taken = set(batch)
        state = replace(state, ready=tuple(g for g in state.ready if g not in taken), training=batch)
        oldest = settings.version_of(state.synced) - batch[0].version
        made.append(Train(state.step + 1, tuple(sorted(g.group for g in batch)), max(0, oldest)))
    state, started = _begin(settings, state)
    return state, (*made, *started)


def capacity(settings: StalenessSettings, synced: int) -> int:
    """Return how many groups may have begun once the samplers have the weights of `synced` steps (rule 1)."""
    return min(settings.total, (1 + settings.version_of(synced)) * settings.window + settings.ahead)


def _sync_due(settings: StalenessSettings, state: ControlState) -> bool:
    ended = state.step % settings.parameter_sync_step == 0 or state.step == settings.total_steps
    return ended and state.synced < state.step


def _begin(settings: StalenessSettings, state: ControlState) -> tuple[ControlState, list[Decision]]:
    version = settings.version_of(state.synced)
    room = capacity(settings, state.synced) - state.step * settings.batch - state.under_way
    if settings.max_running is not None:
        room = min(room, settings.max_running - len(state.running))
    room = max(0, room)
    first = sorted(state.again)[:room]
    new = range(state.next, state.next + room - len(first))
    numbers = [*first, *new]
    running = (*state.running, *(StartedGroup(number, version) for number in numbers))
    again = tuple(number for number in state.again if number not in set(first))
    state = replace(state, again=again, running=running, next=state.next + len(new))
    return state, [Begin(number, version) for number in numbers]


def _next_batch(settings: StalenessSettings, state: ControlState) -> tuple[StartedGroup, ...]:
    """Return the groups of the next step, those that began first in front; () while it must wait (rule 2)."""
    if state.step == settings.total_steps or len(state.ready) < settings.batch:
        return ()
    batch = tuple(sorted(state.ready, key=lambda g: (g.version, g.group))[: settings.batch])
    chosen = set(batch)
    left = sorted(g.version for g in (*state.running, *state.ready) if g not in chosen)
    for older, version in enumerate(left, 1):  # at least `older` groups must be trained by this one's deadline
        deadline = min(settings.total_steps, (version + settings.bound + 1) * settings.parameter_sync_step)
        if older > (deadline - state.step - 1) * settings.batch:
            return ()
    return batch


def _without(groups: tuple[StartedGroup, ...], number: int) -> tuple[StartedGroup, tuple[StartedGroup, ...]]:
    matches = [g for g in groups if g.group == number]
    if len(matches) != 1:
        raise ValueError(f"group {number} is not being sampled: it cannot have ended")
    return matches[0], tuple(g for g in groups if g.group != number)
