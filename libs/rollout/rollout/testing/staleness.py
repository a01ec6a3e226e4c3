"""For tests of asynchronous control: a referee that knows the promises, and not how they are kept."""

from collections.abc import Iterable
from fractions import Fraction
from math import ceil, floor

from rollout.control.settings import StalenessSettings
from rollout.control.staleness import (
    Begin,
    Decision,
    Event,
    Failed,
    Finished,
    NoSignal,
    Sync,
    Synced,
    SyncFailed,
    Train,
    Trained,
)


class StalenessChecker:
    """A check of one run: `see` every decision, `tell` every event before it is handled; asserts all promises.

    `key` is its whole state, hashable: two runs with equal keys have equal futures.
    """

    def __init__(self, settings: StalenessSettings) -> None:
        self.settings = settings
        self.per_step = settings.groups_per_step * settings.required_batches
        self.per_window = self.per_step * settings.parameter_sync_step
        self.slack = floor(Fraction(settings.staleness_threshold).limit_denominator(1000) * self.per_window)
        self.bound = ceil(Fraction(self.slack, self.per_window))
        self.total = self.per_step * settings.total_steps
        self.running: dict[int, int] = {}
        self.ready: dict[int, int] = {}
        self.broken: frozenset[int] = frozenset()
        self.training: tuple[int, ...] = ()
        self.trained: frozenset[int] = frozenset()
        self.dropped: frozenset[int] = frozenset()
        self.steps = self.version = 0
        self.coming: int | None = None

    @property
    def key(self) -> tuple[object, ...]:
        """Its whole state."""
        groups = (tuple(sorted(part.items())) for part in (self.running, self.ready))
        return (*groups, self.broken, self.dropped, self.training, self.trained, self.steps, self.version, self.coming)

    @property
    def done(self) -> bool:
        """Whether the run has ended: all is trained, and the samplers have the last weights."""
        last = ceil(self.settings.total_steps / self.settings.parameter_sync_step)
        return len(self.trained) == self.total and self.version == last

    def see(self, decisions: Iterable[Decision]) -> None:
        """Check decisions against the promises, and that nothing possible was left undone."""
        for decision in decisions:
            match decision:
                case Begin(group, version):
                    self._begin(group, version)
                case Train(step, groups, staleness):
                    self._train(step, groups, staleness)
                case Sync(version, interrupt):
                    assert self.coming is None, "weights are under way already"
                    assert not self.training, "the weights that are trained cannot be sent"
                    assert version == self.version + 1
                    assert interrupt == bool(self.running)
                    assert self.settings.partial_rollout or not self.running, "weights move under running answers"
                    self.coming = version
        self._nothing_undone()

    def events(self, failures: bool = True, drops: int = 0) -> list[Event]:
        """Return all events that can happen next; so many groups of a run may end without signal."""
        events: list[Event] = [Finished(group) for group in self.running]
        events += [Failed(group) for group in self.running if failures and group not in self.broken]
        events += [NoSignal(group) for group in self.running if len(self.dropped) < drops]
        events += [Trained()] if self.training else []
        if self.coming is not None:
            events += [Synced(), SyncFailed()] if failures else [Synced()]
        return events

    def tell(self, event: Event) -> None:
        """Apply an event that is about to be handled. A group fails once at most."""
        match event:
            case Finished(group):
                self.ready[group] = self.running.pop(group)
            case NoSignal(group):
                del self.running[group]
                self.dropped |= {group}
            case Failed(group):
                del self.running[group]
                self.broken |= {group}
            case Trained():
                self.trained |= set(self.training)
                self.training, self.steps = (), self.steps + 1
            case Synced():
                assert self.coming is not None
                self.version, self.coming = self.coming, None
            case SyncFailed():
                self.coming = None

    def _begin(self, group: int, version: int) -> None:
        assert version == self.version, "begun with other weights than the samplers have"
        assert self.coming is None, "begun while weights move"
        assert 0 <= group < self.total + len(self.dropped)
        assert group not in {*self.running, *self.ready, *self.training, *self.trained, *self.dropped}, (
            f"group {group} twice"
        )
        self.running[group] = version
        assert self._under_way <= self._most, "more groups are under way than the bound allows"
        assert self.settings.max_running is None or len(self.running) <= self.settings.max_running

    def _train(self, step: int, groups: tuple[int, ...], staleness: int) -> None:
        assert not self.training, "two steps at once"
        assert step == self.steps + 1
        assert self.coming is None, "trained while weights move"
        assert len(set(groups)) == len(groups) == self.per_step
        assert set(groups) <= set(self.ready), "trained before it was sampled, or twice"
        ages = [self.version - self.ready.pop(group) for group in groups]
        assert staleness == max(ages), "the staleness told is not the real one"
        assert max(ages) <= self.bound, f"staleness {max(ages)} is over the bound {self.bound}"
        assert self.version * self.settings.parameter_sync_step <= self.steps, "trained with weights nobody has"
        assert self.steps < (self.version + 1) * self.settings.parameter_sync_step, (
            "the samplers were not handed weights"
        )
        self.training = groups

    @property
    def _under_way(self) -> int:
        return len(self.trained) + len(self.running) + len(self.ready) + len(self.training)

    @property
    def _most(self) -> int:
        return min(self.total, self.per_window * (1 + self.version) + self.slack)

    def _nothing_undone(self) -> None:
        """Assert that all groups that may begin have begun, that due weights are synced, and that the run goes on."""
        due = self.steps > 0 and (
            self.steps == self.settings.total_steps or self.steps % self.settings.parameter_sync_step == 0
        )
        due = due and self.version * self.settings.parameter_sync_step < self.steps
        if due and not self.training and (self.settings.partial_rollout or not self.running):
            assert self.coming is not None, "the weights do not move"
        waits = self.coming is not None or (due and not self.training)
        full = self.settings.max_running is not None and len(self.running) == self.settings.max_running
        if not waits and not full:
            assert self._under_way == self._most, "less is sampled than could be"
        if not waits and not self.training and not self.running and not self.done:
            raise AssertionError("deadlock: nothing can ever happen again")
