"""The page of metrics is drawn from its file, and each name that the code writes has a line there."""

from pathlib import Path

from docs.draw_metrics import meanings, page, unknown, written

ROOT = Path(__file__).absolute().parents[1]


def test_the_page_is_drawn_from_its_file() -> None:
    assert (ROOT / "docs/metrics.md").read_text(encoding="utf-8") == page(meanings(ROOT))


def test_each_metric_of_the_code_has_a_line() -> None:
    names = written(ROOT)
    assert len(names) > 60
    assert unknown(names, meanings(ROOT)) == []


def test_a_metric_without_a_line_is_named() -> None:
    assert unknown({"tool/x/calls": "", "tool/x": "", "new/one": ""}, {"A": {"tool/{}/calls": "calls"}}) == [
        "tool/x",
        "new/one",
    ]
