"""The progress display of a run in the terminal, and the table at its end."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.progress import Progress as RichProgress
from rich.table import Table
from rich.text import Text


class _Values(ProgressColumn):
    """The latest values of the run, as `name value` pairs."""

    def render(self, task: Task) -> Text:
        shown = Text()
        for name, value in task.fields.get("values", {}).items():
            shown.append("  " if shown else "")
            shown.append(f"{name} ", style="dim")
            shown.append(value, style="bold")
        return shown


class Progress:
    """Live progress of `total` steps: a bar, the latest values, time spent and time left.

    In a terminal it redraws one line; elsewhere it prints a plain line at most every `every` seconds, and one at the
    start and the end. Time left is judged by the mean pace since the first step of this process, so a resumed run
    (`start` > 0) is not misled by the steps it did not take.
    """

    def __init__(
        self,
        total: int,
        label: str = "training",
        start: int = 0,
        every: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if total < 1 or not 0 <= start <= total:
            raise ValueError(f"progress needs 0 <= start <= total and total >= 1, got start={start}, total={total}")
        self.console = console or Console(highlight=False)
        self._total, self._label, self._start, self._every, self._clock = total, label, start, every, clock
        self._done = self._printed = start
        self._values: dict[str, str] = {}
        self._passing: dict[str, str] = {}
        self._began = self._last = clock()
        self._live: RichProgress | None = None

    def __enter__(self) -> "Progress":
        self._began = self._last = self._clock()
        if self.console.is_terminal:
            self._live = RichProgress(
                SpinnerColumn(),
                TextColumn("{task.description}", style="bold"),
                BarColumn(bar_width=24 if self.console.width >= 110 else 10),
                MofNCompleteColumn(),
                _Values(),
                TextColumn("{task.fields[left]}", style="cyan"),
                console=self.console,
                transient=False,
            )
            self._task = self._live.add_task(self._label, total=self._total, completed=self._start, values={}, left="")
            self._live.start()
        else:
            since = f" after the {self._start} of the checkpoint" if self._start else ""
            self.console.print(f"{self._label}: {self._total - self._start} steps{since}", soft_wrap=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._done > self._printed:
            self._line()

    def update(self, step: int, values: Mapping[str, float | int | str] | None = None) -> None:
        """Show that `step` steps are done; `values` replace the shown ones of the same name."""
        self._done = min(step, self._total)
        self._values.update({k: shown(v) for k, v in (values or {}).items()})
        self._passing = {}
        if self._live is not None:
            self._live.update(self._task, completed=self._done, values=dict(self._values), left=self.timing())
        elif self._clock() - self._last >= self._every:
            self._line()

    def tell(self, values: Mapping[str, float | int | str]) -> None:
        """Show `values` of the running step, such as the number of requests in flight, until the step is done."""
        self._passing = {k: shown(v) for k, v in values.items()}
        if self._live is not None:
            self._live.update(self._task, values=self._values | self._passing)
        elif self._clock() - self._last >= self._every:
            self._line()

    def note(self, text: str) -> None:
        """Print a line above the bar."""
        (self._live.console if self._live else self.console).print(text, soft_wrap=True, markup=False)

    def timing(self) -> str:
        """Return elapsed and remaining time in words; empty before the first step."""
        spent = self._clock() - self._began
        taken = self._done - self._start
        if taken <= 0:
            return ""
        left = spent / taken * (self._total - self._done)
        return f"{clock_time(spent)} spent, {clock_time(left)} left"

    def _line(self) -> None:
        self._last, self._printed = self._clock(), self._done
        parts = [f"{self._label} {self._done}/{self._total}"]
        parts += [f"{name} {value}" for name, value in (self._values | self._passing).items()]
        parts.append(self.timing())
        self.console.print("  ".join(p for p in parts if p), soft_wrap=True, markup=False)


def shown(value: float | int | str) -> str:
    """Return a number as readable text: 4 significant digits, thousands with commas."""
    if isinstance(value, str | bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size < 1e-3:
        return f"{value:.2e}"
    return f"{value:.4g}"


def clock_time(seconds: float) -> str:
    """Return seconds as m:ss or h:mm:ss."""
    whole = max(0, round(seconds))
    hours, rest = divmod(whole, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


def summary_table(rows: Iterable[Sequence[Any]], title: str = "Summary", console: Console | None = None) -> Table:
    """Print a table of (name, value) rows and return it; paths and text are shown in full, numbers by `shown`."""
    console = console or Console(highlight=False)
    table = Table(title=title, title_justify="left", show_header=False, title_style="bold", expand=False)
    table.add_column("name", style="dim", no_wrap=True)
    table.add_column("value", overflow="fold")
    for name, value in rows:
        table.add_row(Text(str(name)), Text(shown(value) if isinstance(value, float | int) else str(value)))
    console.print(table)
    return table
