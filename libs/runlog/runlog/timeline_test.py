"""Spans, their idle shares by hand, and a picture that is safe inside a page."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from runlog import RunLog, write_report
from runlog.timeline import MOST_SPANS, TIMELINE, Span, bubble_shares, busy_seconds, read_timeline, timeline_figure

SPANS = [
    Span("sampler", "sample", 10.0, 14.0),
    Span("sampler", "sample", 13.0, 16.0),
    Span("trainer", "train", 14.0, 15.0),
    Span("trainer", "train", 18.0, 20.0),
]


def test_overlaps_count_once() -> None:
    assert busy_seconds(SPANS[:2]) == pytest.approx(6.0)
    assert bubble_shares(SPANS) == pytest.approx({"sampler": 0.4, "trainer": 0.7})
    assert bubble_shares([]) == {}
    assert bubble_shares([Span("a", "b", 1.0, 1.0)]) == {"a": 0.0}


def test_the_picture_has_every_span_where_it_was() -> None:
    root = ET.fromstring(timeline_figure(SPANS))
    bars = list(root.iter("rect"))
    assert len(bars) == len(SPANS)
    left, width = (float(bars[0].attrib[name]) for name in ("x", "width"))
    assert float(bars[2].attrib["x"]) == pytest.approx(left + width, abs=0.02)  # training begins where sampling ends
    assert float(bars[3].attrib["width"]) == pytest.approx(width / 2, abs=0.02)
    said = "".join(root.itertext())
    assert "0 s10.0 s" in said
    assert "sampler idle 40%, trainer idle 70%" in said
    legend = root.find("div")
    assert legend is not None
    swatches = {span[0].attrib["style"][-7:] for span in legend}
    assert "".join(legend.itertext()) == "sampletrain"
    assert swatches == {bar.attrib["fill"] for bar in bars}
    assert not list(root.iter("text"))  # which would shrink with the page


def test_names_are_text_and_long_runs_show_their_end() -> None:
    root = ET.fromstring(timeline_figure([Span("<script>", "&<b>", 0.0, 1.0)]))
    assert "<script>" in "".join(root.itertext())
    many = [Span("a", "train", float(n), n + 0.5) for n in range(MOST_SPANS + 7)]
    root = ET.fromstring(timeline_figure(many))
    assert len(list(root.iter("rect"))) == MOST_SPANS
    assert "7 earlier spans left out" in "".join(root.itertext())
    assert timeline_figure([]) == ""


def test_a_run_folder_with_a_timeline_has_it_in_its_report(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, tensorboard=False) as log:
        log.metrics(1, {"reward": 1.0})
    assert "Timeline" not in write_report(tmp_path).read_text()
    lines = [json.dumps(span._asdict()) for span in SPANS]
    (tmp_path / TIMELINE).write_text("\n".join(lines) + '\n{"lane": "cut sho')
    assert read_timeline(tmp_path) == SPANS
    assert "trainer idle 70%" in write_report(tmp_path).read_text()


DAY = 86400.0


def written(run_dir: Path, *rows: Span | int) -> list[Span]:
    """What is read of a file with these spans; a number is where a process began, at so many steps."""
    lines = [json.dumps({"start": row} if isinstance(row, int) else row._asdict()) for row in rows]
    (run_dir / TIMELINE).write_text("\n".join(lines) + "\n")
    return read_timeline(run_dir)


def step(begin: float, sampled: float, trained: float, synced: float) -> list[Span]:
    """A step in turn."""
    return [
        Span("sampler", "sample", begin, sampled),
        Span("trainer", "train", sampled, trained),
        Span("weights", "sync", trained, synced),
    ]


def test_the_day_before_a_run_went_on_is_nobodys_idle_time(tmp_path: Path) -> None:
    """Ten seconds of work, a day, ten seconds of work."""
    spans = [
        Span(lane, kind, at, at + 10) for at in (0, DAY) for lane, kind in (("trainer", "train"), ("sampler", "sample"))
    ]
    assert bubble_shares(written(tmp_path, 0, *spans[:2], 1, *spans[2:])) == {"trainer": 0.0, "sampler": 0.0}
    assert bubble_shares(written(tmp_path, *spans))["trainer"] > 0.99  # one process that did nothing all day


def test_steps_that_a_run_did_again_are_counted_once(tmp_path: Path) -> None:
    """The checkpoint holds one step of two; the second is done again, and was half done a third time."""
    kept, undone = step(0, 3, 5, 6), step(6, 9, 11, 12)
    again = step(DAY, DAY + 3, DAY + 5, DAY + 6)
    left = [*kept, *undone, Span("sampler", "sample", 12, 14)]
    found = written(tmp_path, 0, *left, 1, again[0], 1, *again)
    assert [(s.lane, s.begin - found[0].begin, s.end - found[0].begin) for s in found] == [
        (s.lane, s.begin, s.end) for s in [*kept, *undone]
    ]
    assert written(tmp_path, 0, *left, 0, *again) == again  # it began anew
    ahead = Span("sampler", "sample", 3, 14)  # beside training, cut where the checkpoint is
    assert max(s.end for s in written(tmp_path, 0, *kept, *undone, ahead, 1)) == 6
