"""When a sampler counts as busy, by a clock that the test has in hand."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from runlog.timeline import read_timeline
from schedules.reporting import timeline as module
from schedules.reporting.timeline import SamplerLane, Timeline


def test_a_sampler_that_never_rests_is_cut_at_each_hand_over_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(now=0.0, time=lambda: 1000.0)
    clock.perf_counter = lambda: clock.now
    monkeypatch.setattr(module, "time", clock)
    lane = SamplerLane(Timeline(tmp_path, 0))
    for at in (0.0, 1.0):
        clock.now = at
        lane.runs()
    lane.held(4.0, 5.0)
    lane.held(8.0, 9.0)
    clock.now = 12.0
    lane.rests()
    clock.now = 13.0
    lane.held(12.5, 12.75)  # nothing was sampled
    lane.rests()
    lane.runs()
    clock.now = 14.0
    lane.rests()
    spans = [(span.begin - 1000, span.end - 1000) for span in read_timeline(tmp_path)]
    assert spans == [(0, 4), (5, 8), (9, 12), (13, 14)]
