"""Spans, their idle shares by hand, and a picture that is safe inside a page."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from runlog import RunLog, write_report
from runlog.timeline import MOST_SPANS, TIMELINE, Span, bubble_shares, busy_seconds, read_timeline, timeline_svg

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
    root = ET.fromstring(timeline_svg(SPANS))
    bars = root.findall("rect")
    assert len(bars) == len(SPANS)
    left, width = (float(bars[0].attrib[name]) for name in ("x", "width"))
    assert float(bars[2].attrib["x"]) == pytest.approx(left + width, abs=0.02)  # training begins where sampling ends
    assert float(bars[3].attrib["width"]) == pytest.approx(width / 2, abs=0.02)
    said = "".join(root.itertext())
    assert "10.0 s; sampler idle 40%, trainer idle 70%" in said


def test_names_are_text_and_long_runs_show_their_end() -> None:
    root = ET.fromstring(timeline_svg([Span("<script>", "&<b>", 0.0, 1.0)]))
    assert "<script>" in "".join(root.itertext())
    many = [Span("a", "train", float(n), n + 0.5) for n in range(MOST_SPANS + 7)]
    root = ET.fromstring(timeline_svg(many))
    assert len(root.findall("rect")) == MOST_SPANS
    assert "7 earlier spans left out" in "".join(root.itertext())
    assert timeline_svg([]) == ""


def test_a_run_folder_with_a_timeline_has_it_in_its_report(tmp_path: Path) -> None:
    with RunLog(tmp_path, {}, tensorboard=False) as log:
        log.metrics(1, {"reward": 1.0})
    assert "Timeline" not in write_report(tmp_path).read_text()
    lines = [json.dumps(span._asdict()) for span in SPANS]
    (tmp_path / TIMELINE).write_text("\n".join(lines) + '\n{"lane": "cut sho')
    assert read_timeline(tmp_path) == SPANS
    assert "trainer idle 70%" in write_report(tmp_path).read_text()
