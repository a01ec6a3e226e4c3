"""What `offload` does to megatron-core's real buffers: memory that goes and comes back, and every view with it."""

from typing import Any

import pytest
import torch

from engines.megatron.runtime.buffer_offload import Moved
from engines.proofs.megatron_layouts import LENGTHS, LayoutCase, engine_of, largest_difference
from engines.testing.executors import inside, weights
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import SFT

CASE = LayoutCase("Qwen3.5")
AWAY: dict[str, tuple[LayoutCase, dict[str, Any]]] = {
    "plain": (CASE, {}),
    "shared": (CASE, {"dtype": "bfloat16", "distributed_optimizer": True}),
    "experts": (LayoutCase("Qwen3.5 MoE"), {}),
    "experts, shared": (LayoutCase("Qwen3.5 MoE"), {"dtype": "bfloat16", "distributed_optimizer": True}),
    "adapters": (LayoutCase("Qwen3.5, LoRA"), {"dtype": "bfloat16"}),
}


@pytest.mark.parametrize("name", AWAY)
def test_buffers_go_away_and_come_back(name: str) -> None:
    """Every storage is empty in between: views of parameters (frozen ones too), gradients and masters are valid after
    it, whatever a gradient's storage held."""
    case, options = AWAY[name]
    built = engine_of(case, **options)
    batch = tiny_batch(list(LENGTHS))
    built.train_batch(batch, SFT())
    executor, moved = inside(built), Moved()
    before = weights(built)
    buffers = [*executor.chunks[0].buffers, *executor.chunks[0].expert_parallel_buffers]
    tensors = executor.memory.kept(executor.device)
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert {p.untyped_storage().data_ptr() for p in executor.stages[0].parameters()} <= storages
    trained = [p for p in executor.stages[0].parameters() if p.requires_grad]
    trained[0].main_grad.fill_(torch.nan)  # what a gradient was, nobody reads again
    moved.offload(tensors, [buffer.grad_data for buffer in buffers])
    every = [*tensors, *(p.main_grad for p in trained)]
    assert {tensor.untyped_storage().nbytes() for tensor in every} == {0}
    moved.back()
    assert not any(p.main_grad.any() for p in trained)
    assert largest_difference(before, weights(built)) == 0
    straight = engine_of(case, **options)
    straight.train_batch(batch, SFT())
    for engine in (built, straight):
        engine.train_batch(batch, SFT())
    assert largest_difference(weights(straight), weights(built)) == 0
