"""Pages of runs in a real browser: Chromium, driven over chromedriver's own HTTP protocol (W3C WebDriver)."""

import itertools
import json
import os
import shutil
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from runlog.compare import write_comparison
from runlog.report import write_report
from runlog.run import RunLog
from runlog.serve import server

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(
        not (shutil.which("chromium") and shutil.which("chromedriver")),
        reason="needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)",
    ),
]
HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


class Browser:
    """A session of one headless browser."""

    def __init__(self, port: str, profile: Path) -> None:
        self.base = f"http://127.0.0.1:{port}"
        arguments = [
            "--headless",
            "--force-prefers-reduced-motion",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--window-size=1400,1000",
        ]
        options = {"args": [*arguments, f"--user-data-dir={profile}"], "binary": shutil.which("chromium")}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}
        self.base += "/session/" + self.call("POST", "/session", {"capabilities": capabilities})["sessionId"]

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{method} {path}: {error.read().decode()[:500]}") from error

    def run(self, script: str) -> Any:
        return self.call("POST", "/execute/sync", {"script": script, "args": []})

    def element(self, selector: str) -> str:
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{next(iter(found.values()))}"

    def click(self, selector: str) -> None:
        self.call("POST", self.element(selector) + "/click", {})

    def type(self, selector: str, text: str) -> None:
        self.call("POST", self.element(selector) + "/value", {"text": text})

    def texts(self, selector: str) -> list[str]:
        found = self.run(f"return [...document.querySelectorAll({selector!r})].map(e => e.textContent)")
        return cast(list[str], found)


@pytest.fixture(scope="module")
def driver() -> Iterator[Browser]:
    # Chromium puts a socket under TMPDIR, and a socket's path has at most 107 characters: the sandbox's is longer.
    with tempfile.TemporaryDirectory(prefix="report", dir="/tmp", ignore_cleanup_errors=True) as name:
        yield from session(Path(name))


def session(folder: Path) -> Iterator[Browser]:
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(["chromedriver", "--port=0"], stdout=log, stderr=subprocess.STDOUT, env=environment)
    try:
        deadline = time.monotonic() + 60
        while "successfully on port" not in (folder / "log").read_text():
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        port = (folder / "log").read_text().split("successfully on port ")[1].split(".")[0]
        browser = Browser(port, folder / "profile")
        yield browser
        browser.call("DELETE", "")
    finally:
        process.terminate()
        process.wait(20)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run")
    with RunLog(path.parent / "other", config={"optimizer": {"lr": 1e-3}}, tensorboard=False) as log:
        for step in range(1, 11):
            log.metrics(step, {"reward": step / 10, "loss": 2 / step, "eval/accuracy": 0.3})
    with RunLog(path, config={"optimizer": {"lr": 3e-4}, "note": HOSTILE}, tensorboard=False) as log:
        for step in range(1, 21):
            values = {"reward": step / 20, "loss": 1 / step, "eval/accuracy": 0.4 + step / 50, "custom": step % 4}
            log.metrics(step, values)
            for k in range(3):
                right = (step + k) % 2
                log.episode(
                    {
                        "step": step,
                        "group": k // 2,
                        "reward": float(right),
                        "tokens": [
                            "<|im_start|>",
                            f"{step}+{k}=",
                            str(step + k),
                            HOSTILE if step == 7 else "}",
                            "<|im_end|>",
                        ],
                        "mask": [False, False, True, True, True],
                        "advantage": 0.8 if right else -0.8,
                        "log_probs": [0.0, 0.0, -0.1, -2.0, -0.01],
                        "versions": [-1, -1, step, step, step],
                        "messages": [
                            {"role": "user", "content": f"{step}+{k}="},
                            {
                                "role": "assistant",
                                "content": HOSTILE if step == 7 else str(step + k),
                                "tool_calls": [
                                    {"function": {"name": "calculator", "arguments": '{"expression":"1+1"}'}}
                                ],
                            },
                        ],
                        "metadata": {"end": "done"},
                        "expected": str(step),
                        "parts": {"right": float(right), "short": 0.25},
                    }
                )
            if step % 10 == 0:
                failed = {"step": step, "split": "held-out", "group": 5, "expected": "41", "tokens": ["40"]}
                log.episode(failed | {"reward": 0.0, "error": HOSTILE})
    return path


@pytest.fixture
def page(driver: Browser, run_dir: Path) -> Browser:
    driver.call("POST", "/url", {"url": write_report(run_dir, title="a run").resolve().as_uri()})
    return driver


def rows(page: Browser) -> list[str]:
    return page.texts("#list .row .where")


def test_the_page_loads_without_a_complaint(page: Browser) -> None:
    assert page.run("return document.title") == "a run"
    complaints = [e["message"] for e in page.call("POST", "/se/log", {"type": "browser"}) if e["level"] == "SEVERE"]
    assert complaints == []


def test_charts_are_drawn(page: Browser) -> None:
    wait_for(page, "document.querySelectorAll('#charts .plot svg path.curve').length >= 5")
    assert page.texts("#charts .name") == ["Reward", "Held-out accuracy", "Loss", "custom"]
    assert [t for t in page.texts("#charts .note") if t] == ["before 42.0 %", "after 80.0 %"]


def test_a_chart_draws_every_point_inside_its_frame_and_higher_values_higher(page: Browser) -> None:
    curve = page.run(
        "return document.querySelector('#charts path.curve').getAttribute('d').slice(1).split('L')"
        ".map(p => p.split(' ').map(Number))"
    )
    assert len(curve) == 20
    assert all(right[0] > left[0] and right[1] < left[1] for left, right in itertools.pairwise(curve))
    width, height = page.run("const s = document.querySelector('#charts svg'); return [s.clientWidth, s.clientHeight]")
    assert all(0 < x < width and 0 < y < height for x, y in curve)
    ticks = page.texts("#charts .chart:nth-child(1) .tick")
    assert {"0.2", "0.4", "0.6", "0.8", "1.0"} <= set(ticks)
    assert {"5", "10", "15", "20"} <= set(ticks)
    assert "60%" in page.texts("#charts .chart:nth-child(2) .tick")


def test_axes_end_where_values_can_be(driver: Browser, tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False) as log:
        for step in range(1, 21):
            log.metrics(step, {"eval/accuracy": (step - 1) / 19, "reward": step / 20, "custom": -step})
    driver.call("POST", "/url", {"url": write_report(tmp_path).resolve().as_uri()})
    wait_for_charts(driver, 3)
    accuracy, reward, custom = (
        driver.run(
            f"const s = document.querySelectorAll('#charts svg')[{k}], y = (e) => +e.getAttribute('y');"
            "return [...s.querySelectorAll('.tick[text-anchor=end]')].map(e => [e.textContent, y(e) - 4])"
        )
        for k in (1, 0, 2)
    )
    frame = (12, 190 - 22)  # of a chart, from its top
    ends = dict(accuracy)
    assert (ends["100%"], ends["0%"]) == frame  # no room above and below what a share can be
    assert dict(reward)["0"] == frame[1]
    assert custom[-1] == ["0", frame[0]]
    words = driver.run(
        "const s = document.querySelectorAll('#charts svg')[1];"
        "return [...s.querySelectorAll('.note.outlined')].map(e => +e.getAttribute('y'))"
    )
    assert all(frame[0] < place < frame[1] for place in words)


@pytest.mark.parametrize("width", [390, 820, 1400])
def test_nothing_is_wider_than_the_screen(driver: Browser, run_dir: Path, tmp_path: Path, width: int) -> None:
    lines = [{"lane": lane, "kind": "train", "begin": 0, "end": 1} for lane in ("trainer", "sampler")]
    (run_dir / "timeline.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    pages = [write_report(run_dir), write_comparison([run_dir, run_dir.parent / "other"], tmp_path / "page.html")]
    screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    driver.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": screen})
    for page in pages:
        driver.call("POST", "/url", {"url": page.resolve().as_uri()})
        page_width, room, screen_width = driver.run(
            "const d = document.documentElement; return [d.scrollWidth, d.clientWidth, innerWidth]"
        )
        assert (page_width <= room, screen_width) == (True, width)
    driver.call("POST", "/url", {"url": pages[0].resolve().as_uri()})
    size = driver.run(
        "const t = document.querySelector('.timeline'), s = getComputedStyle(t);"
        "return [parseFloat(s.fontSize), t.querySelector('svg').getBoundingClientRect().width]"
    )
    assert size[0] >= 12
    assert size[1] > 0.55 * min(width, 1320)
    driver.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.clearDeviceMetricsOverride", "params": {}})


def test_a_live_page_takes_new_rows_and_keeps_what_is_selected(driver: Browser, tmp_path: Path) -> None:
    with server(tmp_path) as serving, RunLog(tmp_path, tensorboard=False) as log:
        threading.Thread(target=serving.serve_forever, daemon=True).start()
        for step in (1, 2):
            log.metrics(step, {"reward": step / 4})
            log.episode({"step": step, "group": 0, "reward": 1.0, "tokens": ["2+2=", "4"], "mask": [False, True]})
        driver.call("POST", "/url", {"url": f"http://127.0.0.1:{serving.server_address[1]}/"})
        wait_for(driver, "document.querySelector('#live').textContent === 'live'")
        driver.click("#list .row:nth-child(2)")
        log.metrics(3, {"reward": 0.75})
        log.episode({"step": 3, "group": 0, "reward": 0.0, "tokens": ["3+3=", "5"], "mask": [False, True]})
        wait_for(driver, "document.querySelectorAll('#list .row').length === 3")
        assert "0.75" in driver.texts(".tile .value")
        assert driver.texts("#detail strong") == ["Step 1, group 0"]
        serving.shutdown()
    wait_for(driver, "document.querySelector('#live').textContent === 'no longer served'")


def wait_for(page: Browser, condition: str) -> None:
    deadline = time.monotonic() + 30
    while not page.run(f"return {condition}"):
        assert time.monotonic() < deadline, condition
        time.sleep(0.1)


def wait_for_charts(page: Browser, count: int) -> None:
    wait_for(page, f"document.querySelectorAll('#charts .plot svg').length >= {count}")


def test_a_chart_tells_the_value_under_the_pointer(page: Browser) -> None:
    pointed = (
        "const s = document.querySelector('#charts svg'), b = s.getBoundingClientRect();"
        "s.dispatchEvent(new PointerEvent('pointermove', {clientX: b.left + b.width * SHARE, clientY: b.top + 50}));"
        "return s.querySelector('.value').textContent"
    )
    assert page.run(pointed.replace("SHARE", "0.99")) == "step 20: 1"
    assert page.run(pointed.replace("SHARE", "0.13")) == "step 1: 0.05"


def test_an_episode_shows_its_tokens_calls_and_reward(page: Browser) -> None:
    assert page.texts("#detail .tok") == ["<|im_start|>", "20+0=", "20", "}", "<|im_end|>"]
    assert page.run("return [...document.querySelectorAll('.tok')].map(t => t.dataset.trained)") == [
        "0",
        "0",
        "1",
        "1",
        "1",
    ]
    assert page.texts("#detail .call") == ['calculator {"expression":"1+1"}']
    assert page.texts("#detail .heading .pill") == ["0"]
    assert "3 trained" in page.texts("#detail .fact")


def backgrounds(page: Browser) -> list[str]:
    found = page.run("return [...document.querySelectorAll('.tok')].map(t => getComputedStyle(t).backgroundColor)")
    return cast(list[str], found)


def test_tokens_are_coloured_by_mask_and_by_advantage(page: Browser) -> None:
    clear = "rgba(0, 0, 0, 0)"
    by_mask = backgrounds(page)
    assert by_mask[:2] == [clear, clear]
    assert clear not in by_mask[2:]
    page.click("button[data-colour=advantage]")
    negative = backgrounds(page)
    assert negative[:2] == [clear, clear]
    page.click("#list .row[data-id='59']")  # step 20, group 1: reward 1
    positive = backgrounds(page)
    assert positive[0] == clear
    assert len({by_mask[2], negative[2], positive[2]}) == 3
    assert page.texts("#detail .heading .pill") == ["1"]


def test_filters_and_sorting(page: Browser) -> None:
    assert len(rows(page)) == 62
    page.type("#step-min", "5")
    page.type("#step-max", "6")
    assert len(rows(page)) == 6
    page.type("#reward-min", "0.5")
    assert set(page.texts("#list .pill")) == {"1"}
    assert rows(page) == ["step 6 \u00b7 group 0", "step 5 \u00b7 group 0", "step 5 \u00b7 group 1"]
    sort = "document.getElementById('sort')"
    page.run(f"{sort}.value = 'step-asc'; {sort}.dispatchEvent(new Event('input', {{bubbles: true}}))")
    assert rows(page)[0] == "step 5 \u00b7 group 0"
    assert page.texts("#episode-count") == ["3 of 62 shown"]
    page.type("#search", "no such text")
    assert rows(page) == []
    assert page.texts("#list .empty") == ["No episode matches these filters."]
    page.click("#filters button[type=reset]")
    deadline = time.monotonic() + 30  # the page draws anew after the form's own reset, not within the click
    while len(rows(page)) < 62:
        assert time.monotonic() < deadline


def choose(page: Browser, split: str) -> None:
    page.run(
        f"document.querySelector('#split').value = '{split}';"
        "document.querySelector('#filters').dispatchEvent(new Event('input'))"
    )


def test_siblings_expected_answers_and_held_out_failures(page: Browser) -> None:
    choose(page, "training")
    assert page.texts("#detail .siblings .pill") == ["0", "1"]
    assert page.texts("#detail .named") == ["Expected answer 20", "Reward right 0 \u00b7 short 0.25"]
    page.click("#detail .siblings button:nth-of-type(2)")
    assert page.texts("#detail .heading .pill") == ["1"]
    choose(page, "held-out")
    assert rows(page) == ["step 20 \u00b7 held-out \u00b7 task 5", "step 10 \u00b7 held-out \u00b7 task 5"]
    assert page.texts("#detail .named") == ["Expected answer 41"]
    assert page.texts("#detail .error") == ["Failed: " + HOSTILE]


def test_hostile_text_is_shown_and_never_run(page: Browser) -> None:
    page.type("#search", "document.title")
    assert len(rows(page)) == 3
    assert HOSTILE in page.texts("#detail .tok")
    assert HOSTILE in page.texts("#detail .msg .body")
    assert HOSTILE in page.texts("#config td")
    assert page.run("return document.title") == "a run"
    assert page.run("return document.querySelectorAll('main img, main script').length") == 0


def test_light_and_dark(page: Browser) -> None:
    before = page.run("return getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    after = page.run("return getComputedStyle(document.body).backgroundColor")
    assert before != after
    page.click("#theme")
    assert page.run("return getComputedStyle(document.body).backgroundColor") == before
