"""The report as a file: self-contained, bounded, hostile text harmless. What it does in a browser: browser_test."""

import json
import re
from html.parser import HTMLParser

import pytest

from runlog.report import flat_config, write_report
from runlog.run import RunLog

HOSTILE = "</script><script>document.title='owned'</script><!-- <img src=x onerror=alert(1)> &lt; \u2028 ]]>"


def make_run(path, steps=5, episodes=3, text="ok", config=None):
    with RunLog(path, config=config, tensorboard=False) as log:
        for step in range(1, steps + 1):
            log.metrics(step, {"reward": step / steps, "loss": -step, "time": float(step)})
            for _ in range(episodes):
                said = [{"role": "user", "content": text}]
                tokens = ["<|im_start|>", text]
                log.episode({"step": step, "reward": 1.0, "tokens": tokens, "mask": [False, True], "messages": said})
    return path


class Page(HTMLParser):
    """Scripts, attributes and text of a page, as a browser's parser cuts it."""

    def __init__(self, text):
        super().__init__()
        self.scripts, self.text, self.attributes, self.tags = [], "", [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data):
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data
        else:
            self.text += data


def test_hostile_text_stays_data(tmp_path):
    run = make_run(tmp_path, text=HOSTILE, config={"note": HOSTILE, HOSTILE: 1})
    page = Page(write_report(run, title=HOSTILE).read_text(encoding="utf-8"))
    assert page.tags.count("script") == 3  # data, plotly, ours
    data = json.loads(page.scripts[0])
    assert data["episodes"][0]["tokens"] == ["<|im_start|>", HOSTILE]
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_the_page_asks_the_network_for_nothing(tmp_path):
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(text)
    assert not [(n, v) for n, v in page.attributes if n in ("src", "href") and not v.startswith("#")]
    policy = next(v for n, v in page.attributes if n == "content" and "default-src" in v)
    assert "default-src 'none'" in policy
    assert not re.search(r"@import|url\((?!data:)", text[: text.index("</style>")])


def test_size_is_bounded_for_a_long_run(tmp_path):
    small = write_report(make_run(tmp_path / "small", steps=2)).stat().st_size
    with RunLog(tmp_path / "long", tensorboard=False) as log:
        for step in range(1, 5001):
            log.metrics(step, {f"metric{i}": (step * (i + 3)) % 17 for i in range(12)} | {"reward": step % 5})
            log.episode({"step": step, "reward": step % 2, "tokens": ["word "] * 2000, "mask": [True] * 2000})
    long = write_report(tmp_path / "long").stat().st_size
    assert long - small < 4_000_000


def test_a_run_without_metrics_is_refused(tmp_path):
    with pytest.raises(ValueError, match="log metrics before"):
        write_report(tmp_path)


def test_a_run_without_episodes_or_config_has_a_report(tmp_path):
    text = write_report(make_run(tmp_path, episodes=0)).read_text(encoding="utf-8")
    assert "logged no configuration" in text
    assert '<section id="episodes" hidden>' in text


def test_configuration_is_flat_and_in_its_own_order():
    rows = flat_config({"b": 1, "a": {"x": [1, 2], "empty": {}, "text": "t", "none": None}})
    assert rows == [("b", "1"), ("a.x", "[1, 2]"), ("a.empty", "{}"), ("a.text", "t"), ("a.none", "null")]
    assert flat_config({}) == []
