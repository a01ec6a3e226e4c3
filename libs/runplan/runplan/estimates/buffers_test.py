"""What the plan says of buffers, held to the bytes of the tensors that the code allocates."""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engines import EngineConfig, LoraConfig, Unsupported, build_engine, shared_parameters
from engines.step import PIECE_BYTES
from engines.storage.writer import on_host
from engines.tiny import tiny_batch, tiny_model
from objectives import SFT
from rollout.sync.pieces import buckets
from rollout.sync.staging import WeightStaging
from rollout.vllm.weights.shared_weights import SharedWeights
from runplan.estimates.buffers import (
    DISK,
    Buffer,
    cache_bytes,
    export_bytes,
    largest_tensor,
    sampler_buffers,
    shares_weights,
    state_bytes,
    train_buffers,
    vllm_weights,
)
from runplan.estimates.states import fsdp_states
from runplan.model.model_shape import ModelShape, count_parameters, shape_of
from runplan.plain_settings import PlainCluster, PlainRollout

KINDS = ["dense", "moe", "attention"]


class Allocated(TorchDispatchMode):
    """Bytes of the storages that operations made since and that are alive; `most` of them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        every = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]  # no proxies
        local = [t.to_local() if isinstance(t, DTensor) else t for t in every]
        self.before = [t.untyped_storage() for t in local if t.device.type == "cpu"]  # their addresses stay taken
        self.seen = {storage._cdata for storage in self.before}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self.seen:
            return
        self.seen.add(key)
        size = storage.nbytes()
        self.now += size
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


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
    plan = named(train_buffers(shape, engine.config, states, shape.layers, False, 4, True))
    copied = size_of(on_host(engine.executor.state()))
    assert plan["checkpoint, copied to be written meanwhile"].host == copied == 12 * count_parameters(shape).total


@pytest.mark.parametrize("kind", KINDS)
def test_moments_on_the_host(kind: str) -> None:
    engine, shape = trained(kind, weights="sharded", optimizer_on_host=True)
    moments = [v for s in engine.executor.optimizer.state.values() for v in s.values() if v.ndim]
    states = fsdp_states(shape, engine.config, 1)
    plan = named(train_buffers(shape, engine.config, states, shape.layers, False, 4, True))
    assert plan["optimizer states"].host == sum(m.numel() * 4 for m in moments) == states.host


@pytest.mark.parametrize("kind", KINDS)
def test_the_largest_tensor_is_the_modules(kind: str) -> None:
    model = tiny_model(kind)
    assert largest_tensor(shape_of(model.config, kind)) == max(p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_vllm_has_two_sets_of_weights_in_memory(kind: str) -> None:
    model = tiny_model(kind).bfloat16()
    shape = shape_of(model.config, kind)
    shapes = {name: p.detach() for name, p in model.named_parameters()}
    shared = SharedWeights(shapes, {}, 0)
    try:
        (buffer,) = sampler_buffers(shape, PlainRollout(engine="vllm"), 2)
        assert buffer.always
        assert buffer.host == pytest.approx(2 * shared.nbytes, rel=0.02)  # slots are aligned
        assert vllm_weights(shape, PlainRollout(engine="vllm")) * 2 == buffer.host
        (there,) = sampler_buffers(shape, PlainRollout(engine="vllm", weights_on_device=True), 2)
        assert (there.device, there.host) == (buffer.host, 0)
    finally:
        shared.close()


@pytest.mark.parametrize("kind", KINDS)
def test_the_native_sampler_stages_a_second_set(kind: str) -> None:
    source, model = tiny_model(kind), tiny_model(kind)
    shape = shape_of(model.config, kind)
    engine = build_engine(EngineConfig(device="cpu"), source)
    targets = {name: p.detach() for name, p in model.named_parameters()}
    staging = WeightStaging(targets)
    plan = named(sampler_buffers(shape, PlainRollout(), 4))
    assert plan["weights"].device == sum(p.numel() * 4 for p in targets.values())
    with Allocated() as counted:
        staging.replace(1, engine.export_weights(live=True))
    # The set, and the tensor that is exchanged: the largest one is not, where it comes under a tied name.
    assert plan["weights"].device < counted.most <= 1.02 * plan["staged weights"].device


@pytest.mark.parametrize(
    ("settings", "shared"),
    [
        ({}, True),
        ({"weights": "replicated"}, True),
        ({"weights": "replicated", "dtype": "bfloat16"}, True),
        ({"dtype": "bfloat16", "master_dtype": "bfloat16"}, True),
        ({"optimizer_on_host": True, "parameters_on_host": True}, True),  # the CPU is the host
        ({"dtype": "bfloat16"}, False),
        ({"master_dtype": "bfloat16"}, False),
        ({"lora": LoraConfig(rank=2)}, False),
        ({"backend": "megatron"}, False),
    ],
)
def test_weights_are_shared_in_a_plan_where_the_engine_lends_them(settings: dict[str, Any], shared: bool) -> None:
    config = EngineConfig(device="cpu", **settings)
    assert isinstance(shared_parameters(build_engine(config, tiny_model("dense"))), Unsupported) != shared
    assert shares_weights(config, PlainCluster(), 1, 1) == shared


def test_where_else_weights_are_shared() -> None:
    """On devices that are not here, over ranks, and beside settings that keep them apart."""
    gpu, narrow = EngineConfig(device="cuda"), EngineConfig(device="cuda", master_dtype="bfloat16")
    plain = PlainCluster()
    assert shares_weights(gpu, plain, 1, 1), "replicated, as a GPU alone is by default"
    assert shares_weights(narrow, plain, 1, 1)
    assert shares_weights(EngineConfig(device="cuda", weights="replicated"), plain, 8, 8)
    assert shares_weights(EngineConfig(device="cpu"), plain, 2, 1), "copies of shards of one rank each"
    refused = [
        (replace(gpu, weights="sharded"), plain, 1),
        (replace(narrow, optimizer_on_host=True, parameters_on_host=True, moments_dtype="auto"), plain, 1),
        (gpu, plain, 8),
        (gpu, PlainCluster(apart="it is in a process of its own"), 1),
    ]
    assert [case for case in refused if shares_weights(*case, case[2])] == []


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

    def plan(changed: EngineConfig = engine, offload: bool = False, samples: bool = False) -> dict[str, Buffer]:
        return named(train_buffers(shape, changed, states, shape.layers, offload, 2, samples))

    assert "offload" not in plan()
    assert "hand-over" not in plan()
    assert "hand-over" in plan(samples=True)
    assert plan(offload=True)["offload"].host == states.weights + states.optimizer
    assert plan()["recomputed layers' inputs"].host == 2 * 64 * shape.hidden * shape.layers
    assert "recomputed layers' inputs" not in plan(replace(engine, activation_offload=False))
