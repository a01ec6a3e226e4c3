"""Each tracker with its real package, offline, read back by its own reader; skipped where the package is missing."""

import importlib.util
import json
import struct
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Never

import pytest

from runlog import trackers
from runlog.run import RunLog
from runlog.trackers import TRACKERS, check_tracker, start_tracker

CONFIG = {"lr": "0.001", "model.layers": "4"}


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(importlib.util.find_spec(name) is None, reason=f"needs the package of {name}")


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
    }.items():
        monkeypatch.setenv(name, value)


def test_a_missing_package_is_refused_with_the_line_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in TRACKERS:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, line in (("wandb", "wandb"), ("mlflow", "mlflow-skinny"), ("trackio", "trackio")):
        with pytest.raises(ValueError, match=f"{name} is not installed: pip install {line}"):
            check_tracker(name)
    with pytest.raises(ValueError, match="no tracker 'comet'; there are wandb, mlflow, trackio"):
        check_tracker("comet")


class Recorder:
    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.tables: list[tuple[int, list[float]]] = []
        self.ended: bool | None = None

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self.rows.append((step, dict(values)))

    def episodes(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        assert self.rows[-1][0] == step  # after its metrics, before those of the next: W&B's steps only grow
        self.tables.append((step, [row["reward"] for row in rows]))

    def finish(self, ok: bool) -> None:
        self.ended = ok


def test_a_log_tells_its_trackers_the_numbers_and_how_it_ended(tmp_path: Path) -> None:
    told = Recorder()
    with RunLog(tmp_path / "run", tensorboard=False, trackers=[told]) as log:
        log.metrics(1, {"reward": 0.5, "note": "text", "flag": True, "missing": float("nan")})
    assert told.rows == [(1, {"reward": 0.5})]
    assert told.ended is True
    broken = Recorder()

    def fail() -> Never:
        with RunLog(tmp_path / "other", tensorboard=False, trackers=[broken]):
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert broken.ended is False


def test_episodes_are_tables_of_their_step(tmp_path: Path) -> None:
    told = Recorder()
    with RunLog(tmp_path / "run", tensorboard=False, trackers=[told]) as log:
        for step in (1, 2, 3):
            log.metrics(step, {"reward": 0.5})
            for k in range(step - 1):
                log.episode({"step": step, "reward": k})
    assert told.tables == [(2, [0.0]), (3, [0.0, 1.0])]


def test_a_resumed_run_goes_on_with_each_of_its_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None]] = []

    def starter(name: str) -> Callable[..., tuple[Recorder, str]]:
        def start(project: str, run_dir: Path, config: Mapping[str, str], known: str | None) -> tuple[Recorder, str]:
            asked.append((name, known))
            return Recorder(), known or f"{name}-{len(asked)}"

        return start

    for name in ("wandb", "mlflow"):
        monkeypatch.setitem(trackers._STARTERS, name, starter(name))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    for resume in (False, True, True, False):
        for name in ("wandb", "mlflow"):
            start_tracker(name, "project", tmp_path, CONFIG, resume)
    once = [("wandb", "wandb-1"), ("mlflow", "mlflow-2")]
    assert asked == [("wandb", None), ("mlflow", None), *once, *once, ("wandb", None), ("mlflow", None)]


def two_runs(name: str, run_dir: Path) -> None:
    """Two rows, then a third after a resume."""
    run_dir.mkdir()
    for steps, resume in (((1, 2), False), ((3,), True)):
        tracker = start_tracker(name, "project", run_dir, CONFIG, resume)
        for step in steps:
            tracker.metrics(step, {"reward": step / 10})
            tracker.episodes(step, [{"step": step, "prompt": "2+2=", "completion": "\u00e4", "reward": None}])
        tracker.finish(True)
        time.sleep(1.1)  # wandb names a run's folder by the second: a resume within the same one would find it taken


@installed("mlflow")
def test_mlflow(tmp_path: Path) -> None:
    import mlflow

    two_runs("mlflow", tmp_path / "a-run")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    assert (run.info.run_name, run.info.status) == ("a-run", "FINISHED")
    assert run.data.params == CONFIG
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(m.step, m.value) for m in history] == [(1, 0.1), (2, 0.2), (3, 0.3)]
    assert [one.path for one in client.list_artifacts(run.info.run_id, "completions")] == [
        f"completions/{step:08d}.json" for step in (1, 2, 3)
    ]
    # MLflow's own reader of tables wants pandas, which mlflow-skinny does not bring: the file is read here.
    file = client.download_artifacts(run.info.run_id, "completions/00000003.json", str(tmp_path))
    table = json.loads(Path(file).read_text())
    (row,) = [dict(zip(table["columns"], values, strict=True)) for values in table["data"]]
    assert [row[name] for name in ("step", "prompt", "completion")] == [3, "2+2=", "\u00e4"]


def log_records(data: bytes) -> Iterator[bytes]:
    """The records of an offline run's file: LevelDB's log format after a header of seven bytes."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        length, kind = struct.unpack_from("<HB", data, at + 4)
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or the last part of one
            yield whole
            whole = b""
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768


@installed("mlflow")
def test_mlflow_takes_the_names_of_a_run_and_of_anybodys_reward_parts(tmp_path: Path) -> None:
    """The file store of mlflow-skinny: one name may be the beginning of another, and a part may be called anything."""
    import mlflow

    tracker = start_tracker("mlflow", "project", tmp_path, CONFIG)
    names = ["reward", "reward/std", "reward/environment/Guess", "reward/environment/Guess/share", "reward: a-b"]
    parts = ["right (exact)", "a=b", "", ".", "..", "a//b", " ", "\u00e4 \u2264 1%", "x\ny"]
    for step, name in enumerate([*names, *(f"reward/part/{part}" for part in parts)], 1):
        tracker.metrics(step, {name: step / 2})
    tracker.finish(True)
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("project").experiment_id])
    told = run.data.metrics
    assert [told[n.replace("/", ".")] for n in names] == [0.5, 1.0, 1.5, 2.0, 2.5]
    assert told["reward.part.right _exact_"] == 3.0
    assert len(told) == len(names) + len(parts)


@installed("wandb")
def test_wandb(tmp_path: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    two_runs("wandb", tmp_path / "a-run")
    rows, ids = [], set()
    for path in sorted((tmp_path / "a-run" / "wandb").glob("offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                ids.add((record.run.run_id, record.run.display_name, record.run.project))
            if record.HasField("history"):
                items = {".".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
                rows.append((record.history.step.num, items.get("reward")))
    assert len(ids) == 1
    assert ids.pop()[1:] == ("a-run", "project")
    assert [row for row in rows if row[1]] == [(1, "0.1"), (2, "0.2"), (3, "0.3")]
    tables = [
        json.loads(file.read_text())
        for file in (tmp_path / "a-run").glob("wandb/offline-run-*/files/media/table/*.json")
    ]
    assert sorted(table["data"] for table in tables) == [[[step, "2+2=", "\u00e4", None]] for step in (1, 2, 3)]
    assert {tuple(table["columns"]) for table in tables} == {("step", "prompt", "completion", "reward")}


@installed("trackio")
def test_trackio(tmp_path: Path) -> None:
    import sqlite3

    two_runs("trackio", tmp_path / "a-run")
    with sqlite3.connect(tmp_path / "trackio" / "project.db") as database:
        rows = database.execute("select run_name, step, metrics from metrics order by step").fetchall()
    mine = [row for row in rows if "reward" in json.loads(row[2])]
    assert len({row[0] for row in mine}) == 1
    assert [row[1] for row in mine] == [1, 2, 3]
    tables = [(row[1], found["_value"]) for row in rows if (found := json.loads(row[2]).get("completions"))]
    wanted = {"prompt": "2+2=", "completion": "\u00e4", "reward": None}
    assert tables == [(step, [{"step": step, **wanted}]) for step in (1, 2, 3)]
