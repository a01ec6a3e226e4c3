"""The report as a file: self-contained, bounded, hostile text harmless. What it does in a browser: browser_test."""

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from runlog.report import _groups_within, flat_config, split_config, write_report
from runlog.run import RunLog

HOSTILE = "</script><script>document.title='owned'</script><!-- <img src=x onerror=alert(1)> &lt; \u2028 ]]>"


def make_run(
    path: Path, steps: int = 5, episodes: int = 3, text: str = "ok", config: Mapping[str, Any] | None = None
) -> Path:
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

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.text = ""
        self.attributes: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.lasttag == "script" and self.scripts:
            self.scripts[-1] += data
        else:
            self.text += data


def test_hostile_text_stays_data(tmp_path: Path) -> None:
    run = make_run(tmp_path, text=HOSTILE, config={"note": HOSTILE, HOSTILE: 1})
    page = Page(write_report(run, title=HOSTILE).read_text(encoding="utf-8"))
    assert page.tags.count("script") == 4  # data, charts, the page's own, light or dark
    data = json.loads(page.scripts[0])
    assert data["episodes"][0]["tokens"] == ["<|im_start|>", HOSTILE]
    assert "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]


def test_the_page_asks_the_network_for_nothing(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path)).read_text(encoding="utf-8")
    page = Page(text)
    assert not [(n, v) for n, v in page.attributes if n in ("src", "href") and not v.startswith("#")]
    policy = next(v for n, v in page.attributes if n == "content" and "default-src" in v)
    assert "default-src 'none'" in policy
    assert not re.search(r"@import|url\((?!data:)", text[: text.index("</style>")])


Episodes = Callable[[int], list[dict[str, Any]]]  # those of a step


def long_run(path: Path, metrics: int, episodes: Episodes, steps: int = 400) -> Path:
    with RunLog(path, tensorboard=False) as log:
        for step in range(1, steps + 1):
            log.metrics(step, {f"metric{i}": (step * (i + 3)) % 17 / 7 for i in range(metrics)} | {"reward": step % 5})
            for row in episodes(step):
                log.episode({"step": step, **row})
    return path


def worded(words: str, tokens: int, **more: Any) -> dict[str, Any]:
    said = [{"role": "assistant", "content": words * 30_000}]
    return {"reward": 0.5, "tokens": [words] * tokens, "mask": [True] * tokens, "messages": said, **more}


@pytest.mark.parametrize(
    ("metrics", "episodes"),
    [
        (12, lambda step: [worded("word ", 200, group=step, advantage=0.25) for _ in range(4)]),
        (300, lambda step: [worded("</x>", 2)]),
        (1500, lambda step: []),
        (2, lambda step: [worded("\u2028<&>", 3000, group=0) for _ in range(64)] if step == 7 else []),
        (2, lambda step: [worded("a", 9, split="held-out", group=k) for k in range(3)]),
    ],
    ids=["an ordinary run", "many metrics", "too many metrics", "one huge group", "held-out alone"],
)
def test_the_page_stays_under_a_megabyte(tmp_path: Path, metrics: int, episodes: Episodes) -> None:
    steps = 400 if metrics < 1000 else 50
    path = write_report(long_run(tmp_path, metrics, episodes, steps))
    assert path.stat().st_size <= 1_000_000
    data = json.loads(Page(path.read_text(encoding="utf-8")).scripts[0])
    assert data["charts"]
    assert bool(data["episodes"]) == bool(data["episodes_logged"])


@pytest.mark.parametrize(
    ("flat", "curved", "says"),
    [
        (3, 3, ["3 that never changed", "<td>7</td>"]),
        (250, 3, ["250 that never changed", "and 50 more"]),
        (0, 1500, ["more curves found no room here"]),
        (0, 3, []),
    ],
)
def test_the_page_says_which_curves_are_not_there(tmp_path: Path, flat: int, curved: int, says: list[str]) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 51):
            numbers = {f"flat{i:03}": 7 for i in range(flat)} | {f"metric{i}": (step + i) % 17 for i in range(curved)}
            log.metrics(step, numbers | {"reward": step % 5})
    path = write_report(tmp_path)
    assert path.stat().st_size <= 1_000_000
    text = path.read_text(encoding="utf-8")
    for words in says:
        assert words in text
    for words in ("never changed", "found no room"):
        assert (words in text) == any(words in said for said in says)


def test_siblings_are_shown_together_and_held_out_episodes_too(tmp_path: Path) -> None:
    def episodes(step: int) -> list[dict[str, Any]]:
        group = [worded("w", 40, group=step, log_probs=[-0.1] * 40) for _ in range(8)]
        return [*group, {"split": "held-out", "group": 3, "expected": "18", "tokens": ["17"]}]

    page = Page(write_report(long_run(tmp_path, 2, episodes)).read_text(encoding="utf-8"))
    shown = json.loads(page.scripts[0])["episodes"]
    counts = Counter((e["step"], e["split"]) for e in shown)
    assert {number for (_, split), number in counts.items() if split == "training"} == {8}
    assert {split for _, split in counts} == {"training", "held-out"}
    assert [e["id"] for e in shown] == sorted(e["id"] for e in shown)


def test_long_groups_are_shown_as_often_as_short_ones() -> None:
    """Whatever there is room for: half of the groups are long, and half of those that many pages show."""
    row = {"step": 1, "reward": 1.0, "messages": []}
    kinds = {"long": ["word"] * 1100, "short": ["word"] * 20}
    rng, found = random.Random(0), Counter[str]()
    for _ in range(400):
        groups = [[(n, row | {"expected": k, "tokens": kinds[k]})] for n, k in enumerate(kinds)] * 10
        rng.shuffle(groups)
        shown, used = _groups_within(groups, 20_000)  # room for two long ones
        assert used <= 20_000
        found.update(view["expected"] for view in shown)
    assert 0.45 < found["long"] / found.total() < 0.55


def test_a_run_without_metrics_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="log metrics before"):
        write_report(tmp_path)


def test_a_run_without_episodes_or_config_has_a_report(tmp_path: Path) -> None:
    text = write_report(make_run(tmp_path, episodes=0)).read_text(encoding="utf-8")
    assert "logged no configuration" in text
    assert '<section id="episodes" hidden>' in text


def test_configuration_is_flat_and_in_its_own_order() -> None:
    rows = flat_config({"b": 1, "a": {"x": [1, 2], "empty": {}, "text": "t", "none": None}})
    assert rows == [("b", "1"), ("a.x", "[1, 2]"), ("a.empty", "{}"), ("a.text", "t"), ("a.none", "null")]
    assert flat_config({}) == []


def test_changed_settings_stand_first_beside_their_defaults(tmp_path: Path) -> None:
    config = {"lr": 0.1, "lora": {"rank": 4}, "steps": 5}
    with RunLog(tmp_path, config, tensorboard=False, defaults={"lr": 0.1, "lora": None, "steps": 9}) as log:
        log.metrics(1, {"reward": 0.5})
    assert split_config(tmp_path) == ([("steps", "5", "9"), ("lora.rank", "4", "")], [("lr", "0.1")])
    text = write_report(tmp_path).read_text()
    assert text.index("Changed from the recipe") < text.index('<td class="usual">9</td>') < text.index(">lr<")
