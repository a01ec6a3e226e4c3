"""Every process group of an engine waits as long as the settings say: real ranks of gloo, one of them late."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from engines import EngineConfig, build_engine
from engines.launch import RankError, ensure_group
from engines.megatron.runtime.process_groups import release
from engines.proofs.forked_ranks import launch_forked
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT

LENGTHS = [7, 3, 12, 5, 9, 30]
SECONDS, LONG = 3, 77
LATE = 60.0
OPTIONS: dict[str, Any] = {"device": "cpu", "max_tokens_per_rank": 40}
SETTINGS: dict[str, dict[str, Any]] = {
    "hybrid": {"shard_ranks": 2},
    "experts": {"expert_parallel": 2},
    "dynamic": {"context_parallel": "dynamic", "max_tokens_per_rank": 20},
    "megatron": {
        "backend": "megatron", "tensor_parallel": 2, "expert_parallel": 2, "context_parallel": "dynamic",
        "max_tokens_per_rank": 20,
    },
    "stages": {"backend": "megatron", "pipeline_parallel": 2, "distributed_optimizer": True},
}  # fmt: skip


def engine(name: str, seconds: int | None, **options: Any) -> Any:
    config = EngineConfig(**OPTIONS | SETTINGS[name] | options, collective_timeout_seconds=seconds)
    return build_engine(config, tiny_model("moe", num_hidden_layers=2))


def times(folder: Path) -> list[list[float]]:
    """Train and save beside it; after each engine how long the groups of this process wait, in seconds."""
    timeouts = []
    for name in SETTINGS:
        built = engine(name, LONG)
        built.train_batch(tiny_batch(LENGTHS), SFT())
        built.save(folder / name, wait=False)
        built.wait_for_saves()
        groups = distributed_c10d._world.pg_map
        timeouts.append([group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups])
        release()
    return timeouts


def test_every_group_has_the_time_of_the_settings(tmp_path: Path) -> None:
    before = 1
    for groups in launch_forked(times, (tmp_path,), world_size=4, timeout_seconds=LONG):
        assert len(groups) > before  # each engine made some
        assert set(groups) == {LONG}
        before = len(groups)


def late(name: str, seconds: float) -> float:
    """Rank 1 is late inside its first layer, once, where the others wait for it."""
    built = engine(name, None, max_tokens_per_rank=40)
    first = built.executor.stages[0].decoder if name == "megatron" else built.executor.model.model
    if dist.get_rank() == 1:
        delays = iter([seconds])
        first.layers[0].register_forward_pre_hook(lambda *_: time.sleep(next(delays, 0)))
    loss: float = built.train_batch(tiny_batch(LENGTHS), SFT())["loss"]
    return loss


@pytest.mark.parametrize("name", ["experts", "megatron"])
def test_a_late_rank_ends_the_others_wait(name: str) -> None:
    with pytest.raises(RankError, match=r"(?s)rank 0 failed.*Timed out"):
        launch_forked(late, (name, LATE), world_size=2, timeout_seconds=SECONDS)


def test_torch_waits_longer_by_itself() -> None:
    assert launch_forked(late, ("experts", 1.5 * SECONDS), world_size=2) > 0


def test_a_group_that_waits_for_another_time_is_refused() -> None:
    ensure_group("cpu", LONG)
    try:
        assert engine("dynamic", LONG) is not None
        with pytest.raises(ValueError, match=r"collective_timeout_seconds=9, .* waits 77 s: give launch"):
            engine("dynamic", 9)
    finally:
        dist.destroy_process_group()
