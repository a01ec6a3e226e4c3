"""The log of a run on rank 0; the other ranks have the same object and write nothing."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from apps.common.run.full_disk import FullDiskError, named_by_rank, writing
from apps.common.run.lost_machine import lost_machine
from apps.common.run.run_dir import resume_hint
from engines.launch import RankError, under_torchrun
from runlog import Progress, RunLog, read_metrics, start_tracker, write_report
from runlog.health import check_health, health_row
from runlog.notices import row_notices, run_notices
from runlog.report import flat_config
from schedules.runtime.collectives import rank_and_world
from schedules.runtime.interrupts import defer_interrupts, interrupted, note_termination

HISTORY = 500
"""Steps that the terminal's checks of a run's health look back on; those of the report look at all."""


class Reporter:
    """A logger of metrics, episodes and live progress of a loop of `total` steps; a context manager.

    `resume_step`: None for a new run; for a resumed one the steps that its checkpoint holds. Rows of later steps are
    dropped, and with 0 every row is: that run begins anew. `trackers`: names of `runlog.TRACKERS` that are told too.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        total: int,
        label: str,
        resume_step: int | None = None,
        trackers: Sequence[str] = (),
    ) -> None:
        self.run_dir = run_dir
        keep_until = -1 if resume_step == 0 else resume_step
        self._log: RunLog | None = None
        if rank_and_world()[0] == 0:
            with writing("the log", run_dir):
                run_dir.mkdir(parents=True, exist_ok=True)
            flat, resume = dict(flat_config(config)), resume_step is not None
            with defer_interrupts():
                started = [start_tracker(name, label, run_dir, flat, resume) for name in trackers]
            self._log = RunLog(run_dir, config, keep_until, trackers=started)
        self._total, self._label, self._start = total, label, resume_step or 0
        self._stack = ExitStack()
        self._progress: Progress | None = None
        self._told: set[str] = set()
        self._rows: deque[Mapping[str, Any]] = deque(maxlen=HISTORY)

    def __enter__(self) -> "Reporter":
        if self._log is not None:
            try:
                with defer_interrupts(), writing("the log", self.run_dir):
                    self._stack.enter_context(self._log)
                    progress = self._log.progress(self._total, self._label, start=self._start)
                    self._progress = self._stack.enter_context(progress)
            except BaseException:
                self._stack.close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with defer_interrupts():
            try:
                with writing("the log", self.run_dir):
                    self._stack.__exit__(kind, error, trace)
            except FullDiskError:
                if error is None:
                    raise  # else what was written first has told it

    def step(self, step: int, metrics: Mapping[str, Any], shown: Mapping[str, float | int | str]) -> None:
        """Log one row of metrics with `shown` on the progress line; tell each kind of notice, and of sickness, once.

        Raise a KeyboardInterrupt that was lost.
        """
        with defer_interrupts(), writing("the metrics", self.run_dir):
            if self._log is not None and self._progress is not None:
                self._log.metrics(step, metrics)
                self._progress.update(step, shown)
                row = {"step": step, **metrics}
                self._rows.append(health_row(row))
                sick = {one.name: f"step {step}: {one}" for one in check_health(self._rows) if not one.healthy}
                for kind, line in (row_notices(row) | sick).items():
                    if kind not in self._told:
                        self._told.add(kind)
                        self.note(line)

    def live(self, values: Mapping[str, float | int | str]) -> None:
        """Show the progress within a step, until its row is logged."""
        if self._progress is not None:
            self._progress.tell(values)

    def episode(self, episode: Mapping[str, Any]) -> None:
        """Log one sampled episode for the report's browser."""
        if self._log is not None:
            with writing("an episode", self.run_dir):
                self._log.episode(episode)

    def note(self, text: str) -> None:
        """Print a line above the progress."""
        if self._progress is not None:
            self._progress.note(text)

    def close(self, rows: Iterable[Sequence[Any]], title: str) -> None:
        """Write the report and print the run's notices and the closing table with the paths, after the loop."""
        if self._log is not None:
            with writing("the report", self.run_dir):
                write_report(self.run_dir)
            for line in run_notices(read_metrics(self.run_dir)):
                self._log.console.print(f"warning: {line}", soft_wrap=True, markup=False)
            self._log.summary_table(rows, title)


def _write_reports(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(FullDiskError), writing("the report", folder):
            if read_metrics(folder):
                write_report(folder)


@contextmanager
def report_on_stop(run_dir: Path, *folders: Path) -> Iterator[None]:
    """Write a report of the rows so far where a run is stopped, and say after Ctrl-C how to resume it.

    `folders`: where rows may be besides `run_dir`, such as those of a warm start. An error that Ctrl-C caused somewhere
    below (a library may turn it into its own) counts as Ctrl-C.

    Raises:
        KeyboardInterrupt: with a text for the user.
        FullDiskError: a rank had no space left.
        LostMachineError: another machine no longer answers.
    """
    try:
        # torchrun sends SIGTERM to all ranks where one has failed
        with note_termination() if under_torchrun() else nullcontext():
            try:
                yield
            except BaseException:
                if rank_and_world()[0] == 0:
                    _write_reports((run_dir, *folders))
                raise
    except BaseException as error:
        if interrupted() or isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(resume_hint(run_dir)) from None
        if isinstance(error, RankError) and (full := named_by_rank(error)) is not None:
            raise full from error
        if (lost := lost_machine(error, run_dir)) is not None:
            raise lost from error
        raise
