"""RunLog: what lies in the folder, also after a resume and a kill."""

import io
import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import RecordWriter  # noqa: F401  the format that is read back below

from runlog.run import RunLog
from runlog.store import read_episodes, read_metrics


def quiet() -> Console:
    return Console(file=io.StringIO(), width=100)


def events(folder: Path) -> list[tuple[str, int, float]]:
    """(tag, step, value) of every scalar in TensorBoard files: length, crc, event, crc."""
    found = []
    for path in sorted(folder.iterdir()):
        data, at = path.read_bytes(), 0
        while at < len(data):
            size = int.from_bytes(data[at : at + 8], "little")
            event = Event.FromString(data[at + 12 : at + 12 + size])
            found += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            at += 16 + size
    return found


def test_a_run_folder(tmp_path: Path) -> None:
    config = {"lr": 1e-3, "model": {"layers": 4, "path": tmp_path}}
    with RunLog(tmp_path / "run", config=config, console=quiet()) as log:
        log.metrics(1, {"reward": 0.5, "note": "text"})
        log.metrics(2, {"reward": 0.75, "loss": float("nan")})
        log.episode({"step": 2, "tokens": ["a"], "reward": 1.0})
    assert json.loads((tmp_path / "run" / "config.json").read_text())["model"] == {"layers": 4, "path": str(tmp_path)}
    rows = read_metrics(tmp_path / "run")
    assert abs(rows[1].pop("time") - time.time()) < 3600
    assert rows[0].pop("time") > 1.7e9
    assert rows == [{"step": 1, "reward": 0.5, "note": "text"}, {"step": 2, "reward": 0.75, "loss": None}]
    assert [
        row | {"step": 2, "tokens": ["a"], "reward": 1.0} for row in read_episodes(tmp_path / "run")
    ] == read_episodes(tmp_path / "run")
    assert events(tmp_path / "run" / "tensorboard") == [("reward", 1, 0.5), ("reward", 2, 0.75)]


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    with RunLog(tmp_path, console=quiet()) as log:
        for step in range(1, 6):
            log.metrics(step, {"reward": step / 10})
            log.episode({"step": step})
    with RunLog(tmp_path, resume_step=3, console=quiet()) as log:
        with pytest.raises(ValueError, match="log each step once"):
            log.metrics(3, {"reward": 9.0})
        for step in range(4, 7):
            log.metrics(step, {"reward": step / 10})
            log.episode({"step": step})
    assert [r["step"] for r in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in read_episodes(tmp_path)] == [1, 2, 3, 4, 5, 6]


def test_another_run_is_not_overwritten(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False, console=quiet()) as log:
        log.metrics(0, {"a": 1})
    with pytest.raises(ValueError, match="exists already; resume that run"), RunLog(tmp_path, tensorboard=False):
        pass
    assert not (tmp_path / "tensorboard").exists()


def test_every_line_is_on_disk_at_once(tmp_path: Path) -> None:
    with RunLog(tmp_path, tensorboard=False, console=quiet()) as log:
        log.metrics(1, {"a": 1})
        assert [r["a"] for r in read_metrics(tmp_path)] == [1]


def test_user_errors(tmp_path: Path) -> None:
    log = RunLog(tmp_path, tensorboard=False, console=quiet())
    with pytest.raises(ValueError, match="with"):
        log.metrics(1, {})
    with log:
        log.metrics(5, {})
        with pytest.raises(ValueError, match="upwards"):
            log.metrics(5, {})
        with pytest.raises(ValueError, match="needs its step"):
            log.episode({})


def test_the_summary_names_the_paths_written(tmp_path: Path) -> None:
    out = io.StringIO()
    console = Console(file=out, width=100)
    with RunLog(tmp_path, tensorboard=False, console=console) as log:
        log.metrics(1, {"a": 1})
    log.summary_table([("Reward", 0.8123456)])
    text = out.getvalue().replace("\n", "")
    assert "0.8123" in text
    assert "metrics.jsonl" in text


def test_no_row_starts_a_thread(tmp_path: Path) -> None:
    # Ctrl-C may come in any line of it; a thread that is stopped in its start would be waited for without an end.
    with RunLog(tmp_path / "run", console=quiet()) as log:
        before = set(threading.enumerate())
        log.metrics(1, {"reward": 0.5})
        assert set(threading.enumerate()) == before
