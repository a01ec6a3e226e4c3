"""What the plan says of buffers, held to the bytes of the tensors that the code allocates."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from engines import EngineConfig, build_engine
from engines.storage.writer import on_host
from engines.tiny import tiny_batch, tiny_model
from engines.weights.sizes import PIECE_BYTES
from objectives import SFT
from rollout.sync.pieces import buckets
from runplan.estimates.buffers import (
    DISK,
    Buffer,
    cache_bytes,
    export_bytes,
    largest_tensor,
    state_bytes,
    train_buffers,
)
from runplan.estimates.states import fsdp_states
from runplan.model.model_shape import ModelShape, count_parameters, shape_of
from runplan.testing.allocated import Allocated

KINDS = ["dense", "moe", "attention"]


def trained(kind: str, **settings: Any) -> tuple[Any, ModelShape]:
    model = tiny_model(kind)
    engine = build_engine(EngineConfig(device="cpu", **settings), model)
    engine.train_batch(tiny_batch([9, 5]), SFT())
    return engine, shape_of(model.config, kind)


def size_of(state: Any) -> int:
    tensors = [t for t in tree_leaves(state) if isinstance(t, torch.Tensor) and t.ndim]
    return sum(t.untyped_storage().nbytes() for t in tensors)


def named(buffers: Iterable[Buffer]) -> dict[str, Buffer]:
    return {buffer.name: buffer for buffer in buffers}


@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_is_copied_to_the_host_whole(kind: str) -> None:
    engine, shape = trained(kind, weights="sharded")
    states = fsdp_states(shape, engine.config, 1)
    copied = size_of(on_host(engine.executor.state()))
    assert states.weights + states.optimizer == copied == 12 * count_parameters(shape).total


@pytest.mark.parametrize("kind", KINDS)
def test_moments_on_the_host(kind: str) -> None:
    engine, shape = trained(kind, weights="sharded", optimizer_on_host=True)
    moments = [v for s in engine.executor.optimizer.state.values() for v in s.values() if v.ndim]
    states = fsdp_states(shape, engine.config, 1)
    assert sum(m.numel() * 4 for m in moments) == states.host


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_tensor_is_the_modules(kind: str) -> None:
    model = tiny_model(kind)
    assert largest_tensor(shape_of(model.config, kind)) == max(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_has_a_tensor_or_two_at_a_time(kind: str) -> None:
    """Megatron's, whose every tensor is put together anew; in buckets, as they are handed over."""
    engine, shape = trained(kind, backend="megatron")
    cast = DISK * largest_tensor(shape)  # these models' checkpoints are in float32 as they are
    bound = export_bytes(shape, engine.config) - 2 * PIECE_BYTES - cast
    with Allocated() as counted:
        for bucket in buckets(engine.export_weights(max_bytes=1024), 1024):
            del bucket
    assert 0.75 * bound <= counted.most <= bound + 4 * 1024
    assert counted.most < 4 * count_parameters(shape).total


def test_caches_of_a_worker_are_those_of_its_heads() -> None:
    shape = shape_of(tiny_model("dense").config, "dense")
    assert cache_bytes(shape, 1) == 4 * shape.full_attention_layers * shape.kv_heads * shape.head_dim
    assert cache_bytes(shape, 10**6) * shape.kv_heads == cache_bytes(shape, 1), "a head is on several workers"
    assert state_bytes(shape, 2) * 2 == state_bytes(shape, 1) > 0
    assert state_bytes(shape_of(tiny_model("attention").config, "attention"), 1) == 0


def test_what_comes_with_which_setting() -> None:
    shape = shape_of(tiny_model("dense").config, "dense")
    engine = EngineConfig(device="cuda", gradient_checkpointing=True, activation_offload=True, max_tokens_per_rank=64)
    states = fsdp_states(shape, engine, 2)

    def plan(changed: EngineConfig = engine, samples: bool = False) -> dict[str, Buffer]:
        return named(train_buffers(shape, changed, states, shape.layers, 2, samples))

    assert "export of weights" not in plan()
    assert "export of weights" in plan(samples=True)
    assert plan()["recomputed layers' inputs"].host == 2 * 64 * shape.hidden * shape.layers
    assert "recomputed layers' inputs" not in plan(replace(engine, activation_offload=False))
