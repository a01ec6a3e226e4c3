"""RunLog: the one object through which a training app logs."""

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from rich.console import Console

from runlog import store
from runlog.display import Progress, summary_table
from runlog.episodes import table_row
from runlog.sampling import ordered
from runlog.trackers import Tracker

FLUSH_SECONDS = 2.0
"""Seconds between two writes of TensorBoard's events to the disk."""


class RunLog:
    """A writer of a run directory: `config.json`, `metrics.jsonl`, `episodes.jsonl`, TensorBoard events in
    `tensorboard/`.

    Use it as a context manager. With `resume_step=n` the rows after step n are dropped first and the rest is kept, so a
    resumed run has every step once; without it an existing metrics file is refused (ValueError). `tensorboard=True`
    needs the extra `tessera-runlog[tensorboard]`. Every line is flushed as it is written, TensorBoard's events at most
    every `FLUSH_SECONDS`. `trackers` get the numbers of each row, the episodes of a step as a table, and how the run
    ended (`runlog.trackers`). `defaults`: a configuration against which the report marks the settings that differ.
    """

    def __init__(
        self,
        run_dir: Path | str,
        config: Mapping[str, Any] | None = None,
        resume_step: int | None = None,
        tensorboard: bool = True,
        console: Console | None = None,
        trackers: Sequence[Tracker] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.run_dir = Path(run_dir)
        self.console = console or Console(highlight=False)
        self._resume_step = resume_step
        self._configs = {store.CONFIG: config, store.DEFAULTS: defaults}
        self._tensorboard = tensorboard
        self._trackers = trackers
        self._writer: Any = None
        self._files: dict[str, IO[str]] = {}
        self._last_step = -1
        self._flushed = 0.0
        self._untold: list[Mapping[str, Any]] = []
        """Episodes of one step that the trackers have yet to get."""

    def __enter__(self) -> "RunLog":
        self.run_dir.mkdir(parents=True, exist_ok=True)
        paths = [self.run_dir / store.METRICS, self.run_dir / store.EPISODES]
        if self._resume_step is None:
            taken = next((p for p in paths if p.exists() and p.stat().st_size), None)
            if taken:
                raise ValueError(f"{taken} exists already; resume that run, or choose another folder")
        else:
            for path in paths:
                store.cut_after(path, self._resume_step)
            self._last_step = max((int(r["step"]) for r in store.read_lines(paths[0])), default=-1)
        for name, config in self._configs.items():
            if config is not None:
                text = json.dumps(store.plain(config), indent=2, ensure_ascii=False)
                (self.run_dir / name).write_text(text + "\n", encoding="utf-8")
        for path in paths:
            self._files[path.name] = path.open("a", encoding="utf-8", newline="\n")
        if self._tensorboard:
            self._writer = _event_writer(self.run_dir / "tensorboard", self._resume_step)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()
        self._files = {}
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        self._tell_episodes()
        for tracker in self._trackers:
            tracker.finish(ok=kind is None)

    def metrics(self, step: int, values: Mapping[str, Any]) -> None:
        """Write one row of metrics, with the time. Steps increase, one row each (ValueError otherwise). Numbers also go
        to TensorBoard."""
        if step <= self._last_step:
            raise ValueError(
                f"metrics of step {step} after those of step {self._last_step}; log each step once, upwards"
            )
        self._tell_episodes()
        self._write(store.METRICS, {"step": step, "time": round(time.time(), 3), **values})
        self._last_step = step
        plain = {name: store.plain(value) for name, value in values.items()}
        numbers = {
            name: value
            for name, value in plain.items()
            if isinstance(value, int | float) and not isinstance(value, bool)
        }
        if self._writer is not None:
            self._writer.file_writer.add_summary(_summary(numbers), step)  # one event, not one a number
            if time.monotonic() - self._flushed > FLUSH_SECONDS:  # each waits for the disk
                self._writer.flush()
                self._flushed = time.monotonic()
        for tracker in self._trackers:
            tracker.metrics(step, numbers)

    def episode(self, episode: Mapping[str, Any]) -> None:
        """Write one sampled episode, for the report's browser; see `runlog.episodes` for the keys it understands."""
        if "step" not in episode:
            raise ValueError("an episode needs its step")
        self._write(store.EPISODES, ordered(episode))
        if self._untold and self._untold[0]["step"] != episode["step"]:
            self._tell_episodes()
        self._untold += [episode] if self._trackers else []

    def _tell_episodes(self) -> None:
        """Give the trackers the episodes since the last row of metrics, as rows of one step's table."""
        if self._untold:
            rows = [table_row(episode) for episode in self._untold]
            for tracker in self._trackers:
                tracker.episodes(int(self._untold[0]["step"]), rows)
        self._untold = []

    def progress(self, total: int, label: str = "training", start: int = 0, every: float = 5.0) -> Progress:
        """Return a live display on this log's console; use it as a context manager."""
        return Progress(total, label, start, every, self.console)

    def summary_table(self, rows: Iterable[Sequence[Any]], title: str = "Summary") -> None:
        """Print the closing table: `rows`, then the paths that this run has written."""
        written = [(p.name, str(p)) for p in sorted(self.run_dir.iterdir())] if self.run_dir.exists() else []
        summary_table([*rows, *written], title, self.console)

    def _write(self, name: str, row: Mapping[str, Any]) -> None:
        if name not in self._files:
            raise ValueError("the log is closed; write inside its `with` block")
        self._files[name].write(store.encode(row))
        self._files[name].flush()


def _event_writer(folder: Path, resume_step: int | None) -> Any:
    try:
        from tensorboardX import SummaryWriter
    except ImportError as error:
        raise ValueError(
            'TensorBoard events need "tessera-runlog[tensorboard]"; install it or pass tensorboard=False'
        ) from error
    # The event of the start goes through the writer's queue, so that all its threads run before the first row: a thread
    # that Ctrl-C interrupts in its start never runs, and closing the writer would wait for it without an end.
    return SummaryWriter(str(folder), purge_step=0 if resume_step is None else resume_step + 1)


def _summary(numbers: Mapping[str, float]) -> Any:
    """Return the scalars of a step as one summary of TensorBoard's."""
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.summary import scalar

    return Summary(value=[value for name, number in numbers.items() for value in scalar(name, number).value])
