"""Progress in a terminal and elsewhere, with a clock of our own."""

import io
from typing import Any

import pytest
from rich.console import Console

from runlog.display import Progress, clock_time, shown, summary_table


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def plain_progress(total: int, **options: Any) -> tuple[Progress, Clock, io.StringIO]:
    clock, out = Clock(), io.StringIO()
    return Progress(total, console=Console(file=out, width=60), clock=clock, **options), clock, out


def test_plain_lines_come_every_few_seconds_and_at_the_end() -> None:
    progress, clock, out = plain_progress(10, every=5.0)
    with progress:
        for step in range(1, 11):
            clock.now += 2
            progress.update(step, {"reward": step / 10, "tokens/s": 12345.6})
    lines = out.getvalue().splitlines()
    assert lines == [
        "training: 10 steps",
        "training 3/10  reward 0.3  tokens/s 12,346  0:06 spent, 0:14 left",
        "training 6/10  reward 0.6  tokens/s 12,346  0:12 spent, 0:08 left",
        "training 9/10  reward 0.9  tokens/s 12,346  0:18 spent, 0:02 left",
        "training 10/10  reward 1  tokens/s 12,346  0:20 spent, 0:00 left",
    ]


def test_what_goes_on_within_a_step_is_shown_until_the_step_is_done() -> None:
    progress, clock, out = plain_progress(2, every=5.0)
    with progress:
        for done in (1, 4):
            clock.now += 3
            progress.tell({"episodes": f"{done}/8"})
        clock.now += 6
        progress.update(1, {"reward": 0.5})
    assert out.getvalue().splitlines()[1:] == [
        "training 0/2  episodes 4/8",
        "training 1/2  reward 0.5  0:12 spent, 0:12 left",
    ]


def test_plain_output_holds_no_control_characters() -> None:
    progress, clock, out = plain_progress(2, every=0.0)
    with progress:
        clock.now += 1
        progress.update(1, {"reward": 0.5})
        progress.note("saved [bold]checkpoint[/bold]")
    assert all(c.isprintable() or c == "\n" for c in out.getvalue())
    assert "saved [bold]checkpoint[/bold]" in out.getvalue()  # text is text, never markup


def test_the_last_line_is_not_repeated() -> None:
    progress, clock, out = plain_progress(2, every=0.0)
    with progress:
        clock.now += 1
        progress.update(2)
    assert out.getvalue().count("2/2") == 1


def test_time_left_of_a_resumed_run_looks_at_its_own_steps() -> None:
    progress, clock, out = plain_progress(100, start=80)
    with progress:
        clock.now += 30
        progress.update(90)
        assert progress.timing() == "0:30 spent, 0:30 left"
    assert out.getvalue().splitlines()[0] == "training: 20 steps after the 80 of the checkpoint"


def test_a_terminal_shows_one_live_line() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None, legacy_windows=False)
    with Progress(4, console=console) as progress:
        for step in range(1, 5):
            progress.update(step, {"reward": 0.25 * step, "tokens/s": 9000})
    text = out.getvalue()
    assert "4/4" in text
    assert "reward 1" in text
    assert "9,000" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.123456, "0.1235"), (1e-7, "1.00e-07"), (123456.7, "123,457"), (12, "12"), (12000, "12,000"),
     (-0.5, "-0.5"), ("a", "a"), (True, "True"), (float("nan"), "nan"), (float("inf"), "inf"), (999.96, "1000")],
)  # fmt: skip
def test_numbers_are_short(value: float | str, text: str) -> None:
    assert shown(value) == text


def test_times() -> None:
    assert [clock_time(s) for s in (0, 59.6, 61, 3725, -1)] == ["0:00", "1:00", "1:01", "1:02:05", "0:00"]


def test_long_paths_are_shown_whole() -> None:
    out = io.StringIO()
    path = "/a/" + "very-long-name/" * 8 + "report.html"
    summary_table([("report", path), ("steps", 1200)], console=Console(file=out, width=60))
    rows = [line.split("\u2502") for line in out.getvalue().splitlines() if "\u2502" in line]
    assert "".join(cells[2].strip() for cells in rows) == path + "1,200"


def test_wrong_totals_are_refused() -> None:
    for total, start in ((0, 0), (5, 6), (5, -1)):
        with pytest.raises(ValueError, match="start"):
            Progress(total, start=start)
