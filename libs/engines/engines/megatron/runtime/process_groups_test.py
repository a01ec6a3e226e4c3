"""An engine's groups go with `release()`: no thread, socket or communicator of them stays in the process."""

import gc
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from engines.launch import ensure_group
from engines.megatron.runtime import process_groups as groups
from engines.parallel.layout import ParallelLayout
from engines.proofs.forked_ranks import launch_forked
from engines.proofs.megatron_layouts import LENGTHS, LayoutCase, engine_of
from engines.tiny import tiny_batch
from objectives import SFT

CASES = (
    LayoutCase("Qwen3.5 MoE", {"tensor_parallel": 2, "expert_parallel": 2}),
    LayoutCase("Qwen3.5", {"pipeline_parallel": 2}),
    LayoutCase("Qwen3.5", {"context_parallel": "static:2"}),
)


Held = tuple[int, int]


def held() -> Held:
    """Threads of this process, and groups that torch knows."""
    gc.collect()
    return len(os.listdir("/proc/self/task")), len(dist.distributed_c10d._world.pg_map)


def rounds(count: int) -> list[tuple[list[Held], int]]:
    """What each rank holds after each round of three layouts, and the most groups at work in them."""
    after, most = [], 0
    for _ in range(count):
        for case in CASES:
            engine = engine_of(case)
            engine.train_batch(tiny_batch(list(LENGTHS)), SFT())
            most = max(most, held()[1])
            del engine
            groups.release()
        after.append(held())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (after, most))
    return everyone


def test_what_is_released_leaves_no_thread_and_no_group() -> None:
    for after, most in launch_forked(rounds, (3,), world_size=2):
        assert after[1] == after[2]  # the first round starts threads that stay, of autograd and of dyncp's groups
        assert most > after[2][1] + 5  # megatron-core did make groups


def test_groups_of_a_default_group_that_is_gone_are_only_forgotten() -> None:
    for _ in range(2):
        made = ensure_group("cpu")
        groups.ensure_groups(ParallelLayout(1))
        if made:
            dist.destroy_process_group()
    groups.release()
    assert not parallel_state.model_parallel_is_initialized()
    groups.release()  # nothing is there: no error


def test_another_layout_is_refused_until_the_first_is_released() -> None:
    made = ensure_group("cpu")
    groups.ensure_groups(ParallelLayout(1))
    with pytest.raises(ValueError, match="one layout a process"):
        groups.ensure_groups(ParallelLayout(1), chunks=2)
    groups.release()
    assert list(dist.distributed_c10d._world.pg_map) == [dist.group.WORLD]
    total = torch.ones(1)
    dist.all_reduce(total)  # the default group is as it was
    assert total.item() == 1
    if made:
        dist.destroy_process_group()
