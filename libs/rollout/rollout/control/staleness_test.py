"""The promises of asynchronous control, in every order of events of a small run, and in long random ones."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from rollout.control.settings import StalenessSettings
from rollout.control.staleness import (
    Begin,
    ControlState,
    Event,
    Failed,
    Finished,
    NoSignal,
    StalenessController,
    StartedGroup,
    Sync,
    Synced,
    SyncFailed,
    Train,
    Trained,
)
from rollout.testing.staleness import StalenessChecker

SMALL = [
    StalenessSettings(2, 3),
    StalenessSettings(1, 4, staleness_threshold=1.0),
    StalenessSettings(1, 5, staleness_threshold=1.0, partial_rollout=True),
    StalenessSettings(2, 3, staleness_threshold=0.5),
    StalenessSettings(2, 3, staleness_threshold=0.5, partial_rollout=True),
    StalenessSettings(1, 4, staleness_threshold=2.0, partial_rollout=True),
    StalenessSettings(1, 5, staleness_threshold=0.5, parameter_sync_step=2, partial_rollout=True),
    StalenessSettings(1, 6, staleness_threshold=1.5, parameter_sync_step=2),
    StalenessSettings(1, 3, staleness_threshold=1.0, required_batches=2, partial_rollout=True),
    StalenessSettings(2, 3, staleness_threshold=1.0, partial_rollout=True, max_running=1),
    StalenessSettings(1, 4, staleness_threshold=3.0, max_running=2, partial_rollout=True),
]


def copy_of(referee: StalenessChecker) -> StalenessChecker:
    other = StalenessChecker(referee.settings)
    other.__dict__.update(referee.__dict__, running=dict(referee.running), ready=dict(referee.ready))
    return other


def explore(settings: StalenessSettings, failures: bool = True, most: int = 400_000, drops: int = 0) -> tuple[int, int]:
    """Every order of events; how many states there are, and the largest staleness that was trained."""
    first, referee = StalenessController(settings), StalenessChecker(settings)
    referee.see(first.begin())
    seen, waiting = {(first.state, referee.key)}, [(first.state, referee)]
    oldest, ends = 0, 0
    while waiting:
        state, referee = waiting.pop()
        events = referee.events(failures, drops)
        assert events or referee.done
        ends += referee.done
        for event in events:
            after, controller = copy_of(referee), StalenessController(settings, state)
            after.tell(event)
            decisions = controller.handle(event)
            after.see(decisions)
            assert controller.done == after.done
            oldest = max(oldest, *(d.staleness for d in decisions if isinstance(d, Train)), 0)
            key = (controller.state, after.key)
            if key not in seen:
                seen.add(key)
                assert len(seen) < most, "the model is too large"
                waiting.append((controller.state, after))
    assert ends
    return len(seen), oldest


@pytest.mark.parametrize("settings", SMALL, ids=str)
def test_every_order_of_events_keeps_the_promises(settings: StalenessSettings) -> None:
    states, oldest = explore(settings, failures=settings.total < 6 or settings.max_running is not None)
    assert states > settings.total
    windows = settings.version_of(settings.total_steps)
    assert oldest == min(settings.bound, windows - 1)  # reached, so that a looser bound would be seen


@pytest.mark.parametrize("settings", [StalenessSettings(1, 3), SMALL[3], SMALL[6]], ids=str)
def test_groups_without_signal_are_replaced_in_every_order_of_events(settings: StalenessSettings) -> None:
    explore(settings, failures=False, drops=2)


class Run(RuleBasedStateMachine):
    """Long runs of many sizes; the answers that a group waits for come in any order, some groups fail."""

    @initialize(
        batch=st.integers(1, 5),
        steps=st.integers(1, 8),
        threshold=st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.3, 2.0, 3.7]),
        sync=st.integers(1, 3),
        required=st.integers(1, 2),
        partial=st.booleans(),
        running=st.one_of(st.none(), st.integers(1, 6)),
    )
    def begin(
        self, batch: int, steps: int, threshold: float, sync: int, required: int, partial: bool, running: int | None
    ) -> None:
        self.settings = StalenessSettings(batch, steps, threshold, sync, required, partial, running)
        self.controller, self.referee = StalenessController(self.settings), StalenessChecker(self.settings)
        self.referee.see(self.controller.begin())

    def happen(self, event: Event) -> None:
        self.referee.tell(event)
        self.referee.see(self.controller.handle(event))

    @precondition(lambda self: self.referee.running)
    @rule(data=st.data(), many=st.integers(1, 6))
    def finish(self, data: st.DataObject, many: int) -> None:
        for _ in range(min(many, len(self.referee.running))):
            self.happen(Finished(data.draw(st.sampled_from(sorted(self.referee.running)))))

    @precondition(lambda self: set(self.referee.running) - self.referee.broken)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        self.happen(Failed(data.draw(st.sampled_from(sorted(set(self.referee.running) - self.referee.broken)))))

    @precondition(lambda self: self.referee.running)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        self.happen(NoSignal(data.draw(st.sampled_from(sorted(self.referee.running)))))

    @precondition(lambda self: self.referee.training)
    @rule()
    def train(self) -> None:
        self.happen(Trained())

    @precondition(lambda self: self.referee.coming is not None)
    @rule(well=st.booleans())
    def sync(self, well: bool) -> None:
        self.happen(Synced() if well else SyncFailed())

    @precondition(lambda self: len(self.referee.running) > 1 or self.referee.training)
    @rule(times=st.integers(1, 5))
    def all_but_the_oldest(self, times: int) -> None:
        """One group takes longer than everything else: what the bound is about."""
        oldest = min(self.referee.running, key=lambda group: (self.referee.running[group], group), default=None)
        for _ in range(times):
            for group in [group for group in self.referee.running if group != oldest]:
                self.happen(Finished(group))
            if self.referee.training:
                self.happen(Trained())
            if self.referee.coming is not None:
                self.happen(Synced())

    @precondition(lambda self: self.referee.done)
    @rule()
    def rest(self) -> None:
        assert self.controller.begin() == ()

    @invariant()
    def the_state_is_the_referees(self) -> None:
        if hasattr(self, "referee"):
            state = self.controller.state
            assert {g.group: g.version for g in state.running} == self.referee.running
            assert {g.group: g.version for g in state.ready} == self.referee.ready
            assert self.controller.version == self.referee.version
            assert self.controller.staleness <= max(1, self.settings.bound)

    def teardown(self) -> None:
        """However it stands, it comes to its end."""
        if not hasattr(self, "referee"):
            return
        for _ in range(4 * self.settings.total + 4):
            if not self.referee.done:
                self.happen(self.referee.events(failures=False)[0])
        assert self.controller.done
        assert len(self.referee.trained) == self.settings.total


TestRun = Run.TestCase
TestRun.settings = hypothesis_settings(max_examples=80, stateful_step_count=30, deadline=None)


def test_the_trainer_waits_for_the_group_that_would_be_left_behind() -> None:
    settings = StalenessSettings(1, 6, staleness_threshold=1.0, partial_rollout=True)
    controller = StalenessController(settings)
    assert controller.begin() == (Begin(0, 0), Begin(1, 0))
    assert controller.handle(Finished(1)) == (Train(1, (1,), 0),)
    assert controller.handle(Trained()) == (Sync(1, True),)
    assert controller.handle(Synced()) == (Begin(2, 1),)
    assert controller.handle(Finished(2)) == ()  # group 0 is due: with the next weights it would be too old
    assert controller.handle(Finished(0)) == (Train(2, (0,), 1),)


def test_sampling_goes_on_while_a_step_is_trained() -> None:
    settings = StalenessSettings(2, 5, staleness_threshold=1.0, partial_rollout=True)
    controller = StalenessController(settings)
    assert controller.begin() == tuple(Begin(number, 0) for number in range(4))
    controller.handle(Finished(0))
    assert controller.handle(Finished(1)) == (Train(1, (0, 1), 0),)
    assert [g.group for g in controller.state.running] == [2, 3]


def test_without_partial_rollout_weights_wait_for_what_runs() -> None:
    settings = StalenessSettings(1, 3, staleness_threshold=1.0)
    controller = StalenessController(settings)
    controller.begin()
    controller.handle(Finished(0))
    assert controller.handle(Trained()) == ()
    assert controller.state.phase == "draining"
    assert controller.handle(Finished(1)) == (Sync(1, False),)
    assert controller.handle(SyncFailed()) == (Sync(1, False),)
    assert controller.handle(Synced()) == (Train(2, (1,), 1), Begin(2, 1))


def test_a_resumed_run_goes_on_from_its_state() -> None:
    settings = StalenessSettings(1, 6, staleness_threshold=1.0, partial_rollout=True)
    state = ControlState(step=2, synced=2, next=5, again=(3,), ready=(StartedGroup(4, 1),))
    assert StalenessController(settings, state).begin() == (Train(3, (4,), 1), Begin(3, 2))


def test_what_nobody_was_told_to_do_cannot_have_happened() -> None:
    controller = StalenessController(StalenessSettings(1, 2))
    controller.begin()
    for event in (Finished(1), NoSignal(1), Failed(1), Trained(), Synced(), SyncFailed()):
        with pytest.raises(ValueError, match=r"cannot have|nothing can"):
            controller.handle(event)
    controller.handle(Finished(0))
    with pytest.raises(ValueError, match="group 0 is not being sampled"):
        controller.handle(Finished(0))


def test_thresholds_are_shares_of_a_window() -> None:
    settings = StalenessSettings(128, 400, staleness_threshold=0.5, required_batches=1)
    assert (settings.batch, settings.window, settings.ahead, settings.bound) == (128, 128, 64, 1)
    wide = replace(settings, staleness_threshold=2.1, parameter_sync_step=4, required_batches=2)
    assert (wide.batch, wide.window, wide.ahead, wide.bound) == (256, 1024, 2150, 3)
    assert replace(settings, staleness_threshold=0.001).bound == 0  # less than a group is none
    assert [wide.version_of(step) for step in (0, 1, 4, 5, 8)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    "change",
    [
        {"groups_per_step": 0},
        {"total_steps": True},
        {"staleness_threshold": -0.1},
        {"staleness_threshold": float("nan")},
        {"parameter_sync_step": 0},
        {"required_batches": 0},
        {"max_running": 0},
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(change))} must"):
        replace(StalenessSettings(2, 2), **change)
