"""The batch of a step that ended a run (not finite, or with wrong log-probs), saved as a safetensors file of all its
tensors.

batch = load_batch(run_dir / "not-finite.safetensors")  # the same batch, for `engine.train_batch` or by eye
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from engines import FailedStepError, LocalBatch, LogProbDifferenceError
from schedules.runtime.collectives import rank_and_world
from seqpack import make_batch

NAME = "not-finite.safetensors"
DIFFERENCE = "log-prob-difference.safetensors"


@contextmanager
def save_batch_on_nonfinite(run_dir: Path) -> Iterator[None]:
    """Let rank 0 write the batch of a step that raises FailedStepError where all ranks have it, else each rank the rows
    that it has, in a file of its own; name the file.

    Raises:
        FailedStepError: what was raised inside (NonFiniteError, LogProbDifferenceError), which names the file then.
    """
    try:
        yield
    except FailedStepError as error:
        batch, rank = error.batch, rank_and_world()[0]
        path = run_dir / (DIFFERENCE if isinstance(error, LogProbDifferenceError) else NAME)
        if isinstance(batch, LocalBatch):
            save_batch(batch.view.to_batch(), path := path.with_stem(f"{path.stem}-rank-{rank}"))
        elif not isinstance(batch, TensorDict):
            raise
        elif rank == 0:
            save_batch(batch, path)
        raise type(error)(f"{error}. The batch is in {path}") from error


def save_batch(batch: TensorDict, path: Path) -> None:
    """Write a batch of `make_batch`: tensors as they are, other values as JSON where they have such a form."""
    tensors: dict[str, Tensor] = {}
    others: dict[str, str] = {"rows": str(len(batch))}
    for key in batch.keys():  # noqa: SIM118 (a TensorDict iterates over its samples)
        column = batch[key]
        if not isinstance(column, Tensor):
            others[key] = json.dumps(column.tolist() if hasattr(column, "tolist") else list(column), default=repr)
            continue
        for row, value in enumerate(column.unbind()):
            tensors[f"{row}.{key}"] = value.detach().cpu().contiguous().clone()
    save_file(tensors, path, others)


def load_batch(path: Path) -> TensorDict:
    """Read what `save_batch` wrote."""
    with safe_open(path, "pt") as file:
        others: dict[str, Any] = {key: json.loads(value) for key, value in (file.metadata() or {}).items()}
        samples: list[dict[str, Any]] = [{} for _ in range(others.pop("rows"))]
        for name in file.keys():  # noqa: SIM118 (a file is no mapping)
            row, _, key = name.partition(".")
            samples[int(row)][key] = file.get_tensor(name)
    for key, values in others.items():
        for sample, value in zip(samples, values, strict=True):
            sample[key] = value
    return make_batch(samples)
