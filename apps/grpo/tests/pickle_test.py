"""No pickle travels between the ranks of a run but those of torch's own checkpoint writer (SECURITY.md)."""

import functools
import traceback
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed import distributed_c10d

from apps.grpo.testing.ranks import go_on_ranks
from apps.grpo.testing.recipe import SHALLOW as RECIPE
from apps.grpo.testing.schedules import ASYNC, ONE, SYNC
from engines import EngineConfig
from rollout.workers.authentication import SECRET

WRITER = "torch/distributed/checkpoint/"
BOTH_WAYS = ("_object_to_tensor", "_tensor_to_object")
"""What every collective of torch that takes objects pickles and unpickles by."""


def watched(folder: Path) -> None:
    """Write a line for each object that this rank pickles for others, or unpickles: who asked for it."""
    log = folder / f"pickles-of-{dist.get_rank()}"
    log.touch()
    for name in BOTH_WAYS:
        setattr(distributed_c10d, name, functools.partial(_told, getattr(distributed_c10d, name), log))


def _told(real: Any, log: Path, *arguments: Any, **options: Any) -> Any:
    callers = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_stack()]
    with log.open("a") as file:
        file.write(f"{'checkpoint' if any(WRITER in caller for caller in callers) else ' '.join(callers[-6:])}\n")
    return real(*arguments, **options)


def pickles(folder: Path) -> Counter[str]:
    """Return who asked for pickles in both ranks, and how often."""
    return Counter(line for rank in range(2) for line in (folder / f"pickles-of-{rank}").read_text().splitlines())


ENGINE: EngineConfig = RECIPE.config.engine
CASES: dict[str, dict[str, Any]] = {
    "rows of both ranks": {"schedule": SYNC},
    "one step ahead, shards": {
        "schedule": replace(ONE, weight_sync="shards"),
        "engine": replace(ENGINE, weights="sharded"),
    },
    "fully asynchronous": {"schedule": ASYNC},
    "megatron": {"schedule": SYNC, "engine": replace(ENGINE, backend="megatron", tensor_parallel=2)},
}


@pytest.mark.parametrize("case", CASES)
def test_ranks_pickle_for_torchs_checkpoint_writer_alone(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through warm start, sampling, training, weight syncs, evaluation, checkpoints and export."""
    monkeypatch.delenv(SECRET, raising=False)
    watch = functools.partial(watched, tmp_path)
    go_on_ranks(tmp_path / "run", watch, watch, steps=2, **CASES[case])
    found = pickles(tmp_path)
    assert found.pop("checkpoint") > 0, "what watches sees nothing"
    assert not found, "\n".join(found)
