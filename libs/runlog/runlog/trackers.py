"""Other people's trackers beside a run's own files: Weights & Biases, MLflow, Trackio; each optional.

An adapter is four calls over a tracker's own client. Where it sends to, who the user is and whether it is offline are
the tracker's own variables (WANDB_MODE, MLFLOW_TRACKING_URI, TRACKIO_DIR, ...). A resumed run goes on under its id,
which stands in `tracker.json` of the run folder.
"""

import importlib
import importlib.util
import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

TRACKER = "tracker.json"
TABLE = "completions"
_DISTRIBUTIONS = {"wandb": "wandb", "mlflow": "mlflow-skinny", "trackio": "trackio"}
_MLFLOW_PARAMETER = 6000  # characters of a parameter's value


class Tracker(Protocol):
    """The calls of a run to a tracker. It is made by `start_tracker`."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log one row of numbers."""
        ...

    def episodes(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log sampled episodes of a step as a table (`runlog.episodes.table_row`)."""
        ...

    def finish(self, ok: bool) -> None:
        """End the run: well, or by an error."""
        ...


def as_table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[Any]]]:
    """Return the columns of all rows, and their values."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    return columns, [[row.get(column) for column in columns] for row in rows]


def check_tracker(name: str) -> None:
    """Check that a tracker is installed, without importing it.

    Raises:
        ValueError: no such tracker, or its package is missing; the text holds the line that installs it.
    """
    if name not in _STARTERS:
        raise ValueError(f"no tracker {name!r}; there are {', '.join(_STARTERS)}")
    if importlib.util.find_spec(name) is None:
        raise ValueError(f"the tracker {name} is not installed: pip install {_DISTRIBUTIONS[name]}, or leave it out")


def start_tracker(name: str, project: str, run_dir: Path, config: Mapping[str, str], resume: bool = False) -> Tracker:
    """Start a run named like its directory under `project`; `resume` continues the run that was started for it.

    `config`: flat, dotted names to text.

    Raises:
        ValueError: see `check_tracker`.
    """
    check_tracker(name)
    path = run_dir / TRACKER
    run_ids = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}  # by the other trackers too
    tracker, run_id = _STARTERS[name](project, run_dir, config, run_ids.get(name) if resume else None)
    path.write_text(json.dumps({**run_ids, name: run_id}) + "\n", encoding="utf-8")
    return tracker


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def episodes(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, data = as_table(rows)
        self._run.log({TABLE: importlib.import_module("wandb").Table(columns=columns, data=data)}, step=step)

    def finish(self, ok: bool) -> None:
        self._run.finish(exit_code=0 if ok else 1)


def _start_wandb(project: str, run_dir: Path, config: Mapping[str, str], known: str | None) -> tuple[Tracker, str]:
    wandb = importlib.import_module("wandb")
    run_id = known or secrets.token_hex(6)
    run = wandb.init(
        project=project, name=run_dir.name, dir=str(run_dir), config=dict(config), id=run_id, resume="allow"
    )
    return _Wandb(run), run_id


class _Mlflow:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._id = client, run_id

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._client.log_metric(self._id, _mlflow_name(name), value, step=step)

    def episodes(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        columns, data = as_table(rows)
        path = f"{TABLE}/{step:08d}.json"  # as mlflow.log_table writes it, which needs pandas
        self._client.log_text(self._id, json.dumps({"columns": columns, "data": data}, ensure_ascii=False), path)
        self._client.set_tag(self._id, "mlflow.loggedArtifacts", json.dumps([{"path": path, "type": "table"}]))

    def finish(self, ok: bool) -> None:
        self._client.set_terminated(self._id, status="FINISHED" if ok else "FAILED")


def _mlflow_name(name: str) -> str:
    """Return a metric's name that all of MLflow's stores accept, so that no name ends a run.

    A slash becomes a dot: a store of files can't hold `reward` beside `reward/std`. Characters that MLflow refuses (a
    user's reward component may have any name) become underscores.
    """
    return re.sub(r"[^\w\-. :]", "_", name.replace("/", "."))


def _start_mlflow(project: str, run_dir: Path, config: Mapping[str, str], known: str | None) -> tuple[Tracker, str]:
    client = importlib.import_module("mlflow").MlflowClient()
    if known is not None:
        client.update_run(known, status="RUNNING")
        return _Mlflow(client, known), known
    experiment = client.get_experiment_by_name(project)
    number = client.create_experiment(project) if experiment is None else experiment.experiment_id
    run_id = client.create_run(number, run_name=run_dir.name).info.run_id
    for name, value in config.items():
        client.log_param(run_id, name, value[:_MLFLOW_PARAMETER])
    return _Mlflow(client, run_id), run_id


class _Trackio:
    def __init__(self, run: Any) -> None:
        self._run = run

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def episodes(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = importlib.import_module("trackio").Table(data=[dict(row) for row in rows])
        self._run.log({TABLE: table}, step=step)

    def finish(self, ok: bool) -> None:
        del ok
        self._run.finish()


def _start_trackio(project: str, run_dir: Path, config: Mapping[str, str], known: str | None) -> tuple[Tracker, str]:
    trackio = importlib.import_module("trackio")
    name = known or f"{run_dir.name}-{secrets.token_hex(3)}"
    run = trackio.init(project=project, name=name, config=dict(config), resume="allow")
    return _Trackio(run), name


_STARTERS: dict[str, Callable[[str, Path, Mapping[str, str], str | None], tuple[Tracker, str]]] = {
    "wandb": _start_wandb,
    "mlflow": _start_mlflow,
    "trackio": _start_trackio,
}
TRACKERS = tuple(_STARTERS)
