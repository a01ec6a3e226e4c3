"""A run's log: the trackers named, one run in each however often it is resumed, a report whatever stops it."""

import importlib.util
import json
import os
import signal
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from apps.common.run.reporter import Reporter, report_on_stop
from runlog import trackers
from schedules.runtime.interrupts import handle_interrupts

CONFIG = {"engine": {"lr": 0.1}}


class Recorder:
    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.steps: list[int] = []
        self.ok: bool | None = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.steps.append(step)

    def finish(self, ok: bool) -> None:
        self.ok = ok


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[Recorder]:
    """The tracker "trackio", replaced by one that keeps what it is told."""
    made: list[Recorder] = []

    def start(project: str, run_dir: Path, config: Mapping[str, str], known: str | None) -> tuple[Recorder, str]:
        made.append(Recorder(known or f"{project}-{len(made)}"))
        assert config == {"engine.lr": "0.1"}
        return made[-1], made[-1].id

    monkeypatch.setitem(trackers._STARTERS, "trackio", start)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "trackio" or real(name))
    return made


def run(run_dir: Path, steps: Iterable[int], resume_step: int | None = None, fail: bool = False) -> None:
    with report_on_stop(run_dir), Reporter(run_dir, CONFIG, 9, "app", resume_step, ["trackio"]) as log:
        for step in steps:
            log.step(step, {"reward": 0.5}, {})
        if fail:
            raise RuntimeError("boom")


def test_a_resumed_run_goes_on_under_its_id(tmp_path: Path, recorders: list[Recorder]) -> None:
    run(tmp_path, [1, 2])
    run(tmp_path, [3], resume_step=2)
    assert [(r.id, r.steps, r.ok) for r in recorders] == [("app-0", [1, 2], True), ("app-0", [3], True)]
    assert json.loads((tmp_path / "tracker.json").read_text()) == {"trackio": "app-0"}


def test_a_crash_is_told_and_leaves_a_report(tmp_path: Path, recorders: list[Recorder]) -> None:
    with pytest.raises(RuntimeError, match="boom"):
        run(tmp_path, [1], fail=True)
    assert recorders[0].ok is False
    assert (tmp_path / "report.html").is_file()


def test_ctrl_c_amid_a_row_leaves_the_row_and_a_report(
    tmp_path: Path, recorders: list[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(self: Recorder, step: int, values: Mapping[str, float]) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        self.steps.append(step)

    monkeypatch.setattr(Recorder, "metrics", press)
    with pytest.raises(KeyboardInterrupt, match="stopped"), handle_interrupts():
        run(tmp_path, [1, 2])
    assert (recorders[0].steps, recorders[0].ok) == ([1], False)
    assert (tmp_path / "report.html").is_file()


def test_an_error_that_ctrl_c_caused_counts_as_ctrl_c(tmp_path: Path) -> None:
    """As torch's checkpoints do, which turn whatever is raised in them into an error of their own."""

    def fail() -> None:
        with handle_interrupts(), report_on_stop(tmp_path):
            try:
                os.kill(os.getpid(), signal.SIGINT)
            except KeyboardInterrupt as stop:
                raise RuntimeError("checkpoint failed") from stop

    with pytest.raises(KeyboardInterrupt, match="stopped"):
        fail()
