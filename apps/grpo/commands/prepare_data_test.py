"""Data sets from directories and from a hub on loopback: whole after a stop, nothing fetched twice."""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar, Never
from urllib.parse import unquote, urlparse

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from apps.common.data.presets import PRESETS
from apps.common.data.prompts import read_prompts
from apps.grpo.commands import prepare_data
from apps.grpo.commands.prepare_data import Prepare, prepare

COMMIT = "c" * 40


def lines(rows: Iterable[Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def gsm8k(count: int) -> list[dict[str, Any]]:
    return [{"question": f"What is {i}+{i}?", "answer": f"Twice.\n#### {2 * i}"} for i in range(count)]


def test_a_directory_of_files_becomes_one_file_a_split(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.jsonl").write_bytes(lines(gsm8k(30)))
    (tmp_path / "raw" / "test.jsonl").write_bytes(lines(gsm8k(5)))
    files = prepare(Prepare(str(tmp_path / "raw"), tmp_path / "out"))
    assert {name: pq.read_table(path).num_rows for name, path in files.items()} == {"train": 30, "test": 5}
    preset = PRESETS["gsm8k"]
    prompts = read_prompts(files["train"], preset.prompt_column, preset.answer_column)
    assert (prompts[3].messages[0]["content"], prompts[3].reference) == ("What is 3+3?", "Twice.\n#### 6")


def test_a_correction_reaches_the_file(tmp_path: Path) -> None:
    """Of a source whose rows are as many as before, and others."""
    (tmp_path / "raw").mkdir()
    config = Prepare(str(tmp_path / "raw"), tmp_path / "out")
    for answer in ("wrong", "right"):
        (tmp_path / "raw" / "train.jsonl").write_bytes(lines([{"question": "1+1?", "answer": answer}]))
        assert pq.read_table(prepare(config)["train"])["answer"].to_pylist() == [answer]


def test_a_second_start_leaves_whole_files_and_replaces_others(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "train.jsonl").write_bytes(lines(gsm8k(30)))
    config = Prepare(str(tmp_path / "raw"), tmp_path / "out")
    path = prepare(config)["train"]
    before = path.stat().st_mtime_ns
    assert prepare(config)["train"].stat().st_mtime_ns == before
    pq.write_table(pa.table({"question": ["x"], "answer": ["y"]}), path)
    assert pq.read_table(prepare(config)["train"]).num_rows == 30
    assert not list((tmp_path / "out").rglob("*.writing"))


@pytest.fixture
def mathematics(tmp_path: Path) -> Path:
    """A data set of two configurations, one of which has no held-out split."""
    folder, configs = tmp_path / "mathematics", ""
    folder.mkdir()
    for name, splits in {"algebra": {"train": 6, "test": 2}, "geometry": {"train": 4}}.items():
        configs += f"- config_name: {name}\n  data_files:\n"
        for split, count in splits.items():
            configs += f"  - split: {split}\n    path: {name}/{split}.jsonl\n"
            (folder / name).mkdir(exist_ok=True)
            rows = [{"problem": f"{name} {split} {i}", "solution": "\\boxed{1}"} for i in range(count)]
            (folder / name / f"{split}.jsonl").write_bytes(lines(rows))
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    return folder


def problems(path: Path) -> list[str]:
    texts: list[str] = pq.read_table(path)["problem"].to_pylist()
    return texts


def test_configurations_are_laid_together_or_kept_apart(mathematics: Path, tmp_path: Path) -> None:
    source, out = str(mathematics), tmp_path / "out"
    algebra, geometry, both = (prepare(Prepare(source, out, subset=s)) for s in ("algebra", "geometry", "all"))
    assert problems(algebra["train"]) == [f"algebra train {i}" for i in range(6)]
    assert problems(geometry["train"]) == [f"geometry train {i}" for i in range(4)]
    assert problems(both["train"]) == problems(algebra["train"]) + problems(geometry["train"])
    assert problems(both["test"]) == problems(algebra["test"])
    assert set(geometry) == {"train"}
    assert len({files["train"] for files in (algebra, geometry, both)}) == 3
    with pytest.raises(ValueError, match=r"\(algebra, geometry\): name one with --subset, or --subset all"):
        prepare(Prepare(source, out))


def test_the_preset_math_lays_all_its_configurations_together(
    mathematics: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_data, "_fetch", lambda *asked: mathematics)
    assert len(problems(prepare(Prepare("math", tmp_path / "out"))["train"])) == 10
    assert len(problems(prepare(Prepare("math", tmp_path / "out", subset="geometry"))["train"])) == 4


def test_every_source_subset_and_revision_has_files_of_its_own(tmp_path: Path) -> None:
    sources = [("a/b", None, None), ("a-b", None, None), ("c/b", None, None), ("b", "x", None), ("b", None, "x")]
    keys = [prepare_data._key(*words) for words in sources]
    assert len(set(keys)) == len(keys)
    assert all(key.isascii() and "/" not in key and not key.startswith(".") for key in keys)


@pytest.mark.parametrize(
    ("source", "text"),
    [("no such/data/set", "no directory, no preset"), ("empty", "can't be read"), ("raw --revision", "--revision")],
)
def test_what_is_not_there_is_refused(source: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "raw").mkdir()
    name, _, flag = source.partition(" --")
    with pytest.raises(ValueError, match=text):
        prepare(Prepare(source if not flag else name, tmp_path / "out", revision="main" if flag else None))
    with pytest.raises(ValueError, match="--workers"):
        Prepare("gsm8k", tmp_path, workers=0)


class Hub(BaseHTTPRequestHandler):
    """As much of a hub as a download of one data set asks for; `asked` counts requests for `broken` files."""

    files: ClassVar[dict[str, bytes]] = {}
    broken: ClassVar[set[str]] = set()
    served: ClassVar[Counter[str]] = Counter()
    asked: ClassVar[Counter[str]] = Counter()

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = unquote(urlparse(self.path).path)
        if path.startswith("/api/datasets/openai/gsm8k"):
            found = [
                {"type": "file", "path": n, "rfilename": n, "size": len(c), "oid": hashlib.sha1(c).hexdigest()}
                for n, c in self.files.items()
            ]
            whole = {"id": "openai/gsm8k", "sha": COMMIT, "siblings": found, "private": False, "tags": []}
            return self.send(json.dumps(found if "/tree/" in path else whole).encode(), {}, body, "application/json")
        name = path.split(f"/resolve/{COMMIT}/")[-1] if "/resolve/" in path else None
        if name not in self.files:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.end_headers()
            return None
        content = self.files[name]
        headers = {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if body and name in self.broken:
            self.asked[name] += 1
            self.send_response(500)
            self.end_headers()
            return None
        if body:
            self.served[name] += 1
        return self.send(content, headers, body, "application/octet-stream")

    def send(self, content: bytes, headers: Mapping[str, str], body: bool, kind: str) -> None:
        self.send_response(200)
        for name, value in {**headers, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    Hub.files = {
        "README.md": b"---\nconfigs:\n- config_name: main\n  data_files:\n"
        b"  - split: train\n    path: main/train.jsonl\n  - split: test\n    path: main/test.jsonl\n---\n",
        "main/train.jsonl": lines(gsm8k(40)),
        "main/test.jsonl": lines(gsm8k(8)),
        "weights.bin": b"x" * 1000,
    }
    Hub.broken, Hub.served, Hub.asked = set(), Counter(), Counter()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(hub: str, tmp_path: Path, *more: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE", "BUILD_WORKING_DIRECTORY")}
    environment |= {"HF_ENDPOINT": hub, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
    environment |= {"HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    words = ["-m", "apps.grpo.commands.prepare_data", "--out", str(tmp_path / "out"), *more]
    return subprocess.run(
        [sys.executable, *words], env=environment, capture_output=True, text=True, timeout=200, check=False
    )


def test_a_preset_is_fetched_from_the_hub_and_nothing_is_fetched_twice(hub: str, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "--source", "gsm8k")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "--preset gsm8k --data" in done.stdout
    assert "test.parquet" in done.stdout
    (train,) = (tmp_path / "out").glob("gsm8k-*/train.parquet")
    assert pq.read_table(train).num_rows == 40
    assert set(Hub.served) == {"README.md", "main/train.jsonl", "main/test.jsonl"}
    assert run(hub, tmp_path, "--source", "gsm8k").returncode == 0
    assert set(Hub.served.values()) == {1}


def test_a_stopped_download_goes_on(hub: str, tmp_path: Path) -> None:
    """What the first start has fetched is not fetched again, and nothing is laid down before all is there."""
    Hub.broken = {"main/train.jsonl"}
    stopped = run(hub, tmp_path, "--source", "openai/gsm8k", "--subset", "main", "--workers", "1")
    assert Hub.asked["main/train.jsonl"]
    assert stopped.returncode == 2, stopped.stdout
    assert "start again to go on" in stopped.stderr
    assert not list((tmp_path / "out").rglob("*.parquet"))
    before = dict(Hub.served)
    assert before
    Hub.broken = set()
    done = run(hub, tmp_path, "--source", "openai/gsm8k", "--subset", "main")
    assert done.returncode == 0, done.stderr[-3000:]
    (train,) = (tmp_path / "out").glob("gsm8k-*/train.parquet")
    assert pq.read_table(train).num_rows == 40
    assert set(before) < set(Hub.served) == {"README.md", "main/train.jsonl", "main/test.jsonl"}
    assert set(Hub.served.values()) == {1}


@pytest.mark.parametrize(("workers", "cores", "found"), [(8, 2, 2), (3, 64, 3), (1, 2, 1), (8, None, 1)])
def test_no_more_files_are_fetched_at_a_time_than_there_are_cores(
    workers: int, cores: int | None, found: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = {}

    def download(repository: str, **options: Any) -> Never:
        told.update(options)
        raise OfflineModeIsEnabled("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    with pytest.raises(ValueError, match="can't be fetched"):
        prepare(Prepare("gsm8k", tmp_path / "out", workers=workers))
    assert told["max_workers"] == found


def test_a_data_set_that_is_not_there(hub: str, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "--source", "nobody/nothing")
    assert done.returncode == 2
    assert "nobody/nothing can't be fetched" in done.stderr
