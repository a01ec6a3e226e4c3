"""The native sampler in a plan, held to the bytes of the tensors that it allocates, and to what engines lend."""

from dataclasses import replace
from typing import Any

import pytest

from engines import EngineConfig, LoraConfig, Unsupported, build_engine, shared_parameters
from engines.tiny import tiny_model
from rollout.sync.staging import WeightStaging
from runplan.model.model_shape import shape_of
from runplan.plain_settings import PlainCluster, PlainRollout
from runplan.samplers.native import NativePlan, shares_weights
from runplan.testing.allocated import Allocated


@pytest.mark.parametrize("kind", ["dense", "moe", "attention"])
def test_the_native_sampler_stages_a_second_set(kind: str) -> None:
    source, model = tiny_model(kind), tiny_model(kind)
    shape = shape_of(model.config, kind)
    engine = build_engine(EngineConfig(device="cpu"), source)
    targets = {name: p.detach() for name, p in model.named_parameters()}
    staging = WeightStaging(targets)
    plan = {buffer.name: buffer for buffer in NativePlan().buffers(shape, PlainRollout(), 4)}
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
