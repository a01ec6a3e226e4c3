"""Configuration, learning rates, capabilities, weight pieces and metric sums: everything that needs no model."""

import ast
import math
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engines.backends import TRAIN_BACKENDS
from engines.capability import (
    FSDP2,
    Supported,
    Unsupported,
    refuse_unsupported,
    supports,
    unsupported,
    untested_transformer_options,
    without_deepep,
)
from engines.config import EngineConfig, parse_context_parallel
from engines.execution.lr_schedule import learning_rate
from engines.fast.support import use_replicated_weights
from engines.lora_config import LoraConfig

BAD: dict[str, list[Any]] = {
    "backend": ["fsdp", None, 1],
    "device": ["gpu", ""],
    "batching": ["rows", "Packed"],
    "npu_operators": ["on", True, None],
    "dtype": ["float16", "bf16"],
    "master_dtype": ["float16"],
    "moments_dtype": ["float32", "int8", None],
    "lr_schedule": ["wsd"],
    "prove": ["never", True],
    "allow_untested": ["conv_bias", (1,)],
    "on_nonfinite": ["ignore", True],
    "recheck_every": [-1, 1.5, None],
    "recheck_rows": [-1, "2"],
    "recheck_tokens": [0, None],
    "recheck_bound": [0.0, -1.0, math.nan, math.inf],
    "context_parallel": ["static", "static:0", "static:-1", "static:x", "on", 2, None],
    "model": [7],
    "max_tokens_per_rank": [0, -1, 2.0, True, "16", math.nan],
    "logit_chunk": [0, 1.5],
    "tensor_parallel": [0, -2, 2.0, True],
    "pipeline_parallel": [0, None],
    "virtual_pipeline_parallel": [0, 1.0],
    "first_stage_layers": [0, 1.0],
    "last_stage_layers": [0, True],
    "expert_parallel": [0, "2"],
    "expert_tensor_parallel": [0, None],
    "transformer_options": ["a=1", ("a",), ("a=1", "a=2"), (1,), ("a b=1",)],
    "optimizer": ["sgd", "Muon", None],
    "muon_momentum": [-0.1, 1.0, math.nan, "0.9"],
    "optimizer_on_host": [None, 1],
    "parameters_on_host": [None, 1, True],
    "distributed_optimizer": [None, 1],
    "megatron_optimizer": ["apex", None, True],
    "warmup_steps": [-1, 1.0],
    "total_steps": [0, -3, 2.5],
    "temperature": [0.0, -1.0, math.nan, math.inf, "1", True],
    "lr": [-1e-9, math.nan, math.inf, None],
    "learning_rates": [
        ["a=1"],
        "a=1",
        ("a",),
        ("=1",),
        ("a=1", "a=2"),
        ("a=x",),
        ("a=-1",),
        ("a=nan",),
        ("(=1",),
        (1,),
    ],
    "router_aux_loss_coef": [-0.1, math.nan, "1"],
    "router_z_loss_coef": [-0.1, math.inf, None],
    "router_forwards_ahead": [-1, 1.0, True],
    "min_lr_ratio": [-0.1, 1.1, math.nan],
    "betas": [(0.9,), (0.9, 1.0), (-0.1, 0.9), (0.9, math.nan), [0.9, 0.98], 0.9],
    "eps": [0.0, -1e-8, math.nan],
    "mtp_loss_scaling_factor": [0, 0.0, -0.1, math.nan, "0.1"],
    "weight_decay": [-1.0, math.nan, math.inf],
    "grad_clip": [0.0, -1.0, math.nan, math.inf],
    "skip_zero_gradient_rows": [1, "yes", None],
    "routing_replay": [1, "yes", None],
    "compile": ["yes", True],
    "weights": ["whole", None],
    "collective_timeout_seconds": [0, -1, 1.5, True, "60"],
    "shard_ranks": [0, -1, 2.0, True, "2"],
    "gradient_checkpointing": ["false"],
    "activation_offload": ["false", True],
    "reshard_after_forward": [0],
    "family": ["llama", 3, ""],
    "family_options": [("a=1",), "a", None],
    "vision": ["on", None, True],
    "lora": [None, 16, {"rank": 16}],
}


def test_every_field_refuses_what_cannot_work() -> None:
    """By name, for every field there is, in a schedule in which each field matters."""
    assert BAD.keys() == {field.name for field in fields(EngineConfig)}
    schedule = {"lr_schedule": "cosine", "total_steps": 10}
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(ValueError, match=name):
                EngineConfig(**{**schedule, name: value})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fsdp"}, "backend must be one of 'fsdp2', 'megatron', got 'fsdp'"),
        ({"moments_dtype": "bfloat16", "betas": (0.9, 0.999)}, "keeps no second moment with betas"),
        ({"optimizer_on_host": True, "moments_dtype": "bfloat16"}, "optimizer_on_host keeps float32 moments"),
        ({"parameters_on_host": True}, "set optimizer_on_host=True"),
        ({"activation_offload": True}, "activation_offload moves what gradient_checkpointing keeps"),
        ({"shard_ranks": 2, "weights": "replicated"}, "leave it out, or set weights='sharded'"),
        ({"lr_schedule": "cosine"}, "needs total_steps above warmup_steps"),
        ({"lr_schedule": "linear", "warmup_steps": 5, "total_steps": 5}, "needs total_steps above warmup_steps"),
        ({"min_lr_ratio": 0.1}, "min_lr_ratio has no effect with lr_schedule 'constant'"),
        ({"first_stage_layers": 3}, "no effect with one stage: raise pipeline_parallel"),
        ({"total_steps": 5}, "total_steps has no effect with lr_schedule 'constant'"),
        ({"temperature": 0}, r"temperature must be above 0, got 0 \(for greedy answers use 1.0 here\)"),
        ({"grad_clip": math.inf}, "grad_clip must be a finite number, got inf"),
    ],
)
def test_refusals_say_the_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


@given(
    st.sampled_from(["lr", "weight_decay", "eps", "temperature", "grad_clip", "min_lr_ratio"]),
    st.floats(allow_nan=True, allow_infinity=True),
)
def test_a_number_that_is_accepted_is_one_that_works(name: str, value: float) -> None:
    options: dict[str, Any] = {"lr_schedule": "linear", "total_steps": 4, name: value}
    lowest = 5e-324 if name in ("temperature", "grad_clip", "eps") else 0.0
    highest = 1.0 if name == "min_lr_ratio" else sys.float_info.max
    if not lowest <= value <= highest:
        with pytest.raises(ValueError, match=name):
            EngineConfig(**options)
        return
    config = EngineConfig(**options)
    assert all(math.isfinite(learning_rate(config, step)) for step in range(6))


def test_context_parallel_values() -> None:
    assert [parse_context_parallel(v) for v in ("off", "static:4", "dynamic")] == [1, 4, "dynamic"]


@pytest.mark.parametrize("backend", TRAIN_BACKENDS)
def test_every_capability_answers_with_its_ground(backend: str) -> None:
    """Supported names a test that is there; Unsupported says why. Both backends answer for the same features."""
    config, here = EngineConfig(backend=backend), Path(__file__).parent
    assert TRAIN_BACKENDS[backend].features.keys() == FSDP2.keys()
    for feature in FSDP2:
        answer = supports(config, feature)
        assert isinstance(answer, (Supported, Unsupported))
        assert bool(answer) == isinstance(answer, Supported)
        if isinstance(answer, Supported):
            file, _, function = answer.evidence.partition("::")
            tree = ast.parse((here / file).read_text())
            assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, answer
        else:
            assert len(answer.reason.split()) > 3
    assert supports(config, "fsdp2")
    with pytest.raises(ValueError, match="known are"):
        supports(config, "teleport")


def test_a_backend_that_is_not_installed_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engines.backends.find_spec", lambda name: None)
    answer = supports(EngineConfig(), "megatron")
    assert not answer
    assert isinstance(answer, Unsupported)
    assert "pip install 'tessera-engines[megatron]'" in answer.reason
    with pytest.raises(ValueError, match="megatron is not supported: megatron-core is not installed"):
        refuse_unsupported(EngineConfig(backend="megatron"))


def test_all_that_is_wrong_is_told_at_once() -> None:
    """Ranges, fields beside each other, and the schedule: one start of a run tells what it took four to tell."""
    with pytest.raises(ValueError, match="lr must be") as refusal:
        EngineConfig(lr=-1.0, eps=0.0, parameters_on_host=True, total_steps=5)
    reasons = str(refusal.value).split("; ")
    assert [reason.split()[0] for reason in reasons] == ["lr", "eps", "parameters_on_host", "total_steps"]
    for options in ({"lr": -1.0}, {"eps": 0.0}, {"parameters_on_host": True}, {"total_steps": 5}):
        with pytest.raises(ValueError, match="") as alone:
            EngineConfig(**options)
        assert str(alone.value) in reasons


def test_an_option_of_the_other_backend_is_refused() -> None:
    with pytest.raises(ValueError, match="reshard_after_forward is FSDP2's"):
        refuse_unsupported(EngineConfig(backend="megatron", reshard_after_forward=False))
    with pytest.raises(ValueError, match="transformer_options are Megatron's"):
        refuse_unsupported(EngineConfig(transformer_options=("deallocate_pipeline_outputs=true",)))
    with pytest.raises(ValueError, match="megatron_optimizer is Megatron's"):
        refuse_unsupported(EngineConfig(megatron_optimizer="torch"))
    with pytest.raises(ValueError, match=r"megatron_optimizer='core' cannot be used: .*NPU; set it to 'auto'"):
        refuse_unsupported(EngineConfig(backend="megatron", device="npu", megatron_optimizer="core"))
    both: dict[str, Any] = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2, "first_stage_layers": 2}
    with pytest.raises(ValueError, match="last_stage_layers has not been run with virtual stages"):
        refuse_unsupported(EngineConfig(backend="megatron", prove="off", **both))


@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
        {"virtual_pipeline_parallel": 2},
        {"expert_tensor_parallel": 2},
        {"pipeline_parallel": 2, "last_stage_layers": 1},
        {"distributed_optimizer": True},
        {"megatron_optimizer": "core"},
        {"backend": "megatron", "batching": "padded"},
        {"backend": "megatron", "master_dtype": "bfloat16"},
        {"backend": "megatron", "compile": "on"},
        {"backend": "megatron", "moments_dtype": "bfloat16"},
        {"backend": "megatron", "weights": "replicated"},
        {"backend": "megatron", "shard_ranks": 2},
        {"backend": "megatron", "gradient_checkpointing": True, "activation_offload": True},
    ],
)
def test_unsupported_settings_are_refused_with_the_reason(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not supported:"):
        refuse_unsupported(EngineConfig(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lora": LoraConfig(rank=2)}, "lora has not been run with parameters_on_host"),
        ({"expert_parallel": 2}, "expert_parallel has not been run with parameters_on_host"),
        ({"shard_ranks": 2}, "shard_ranks has not been run with parameters_on_host"),
        ({"backend": "megatron"}, "parameters_on_host is not supported: Megatron's layers compute from weights on"),
        ({"weights": "replicated"}, "weights='replicated' cannot be had: replicated weights are on the device"),
        ({"moments_dtype": "bfloat16"}, "optimizer_on_host keeps float32 moments"),
        ({"optimizer_on_host": False}, "set optimizer_on_host=True"),
    ],
)
def test_what_parameters_on_the_host_are_not_beside_is_refused(options: dict[str, Any], message: str) -> None:
    """Before a model is loaded or a process group made."""

    def build() -> None:
        config = EngineConfig(**{"optimizer_on_host": True, "parameters_on_host": True, "prove": "off", **options})
        refuse_unsupported(config)
        use_replicated_weights(config, torch.device("cuda"), ranks=1)

    with pytest.raises(ValueError, match=message):
        build()


DEEPEP = EngineConfig(
    backend="megatron",
    device="cuda",
    dtype="bfloat16",
    expert_parallel=2,
    transformer_options=("moe_flex_dispatcher_backend=deepep", "moe_deepep_num_sms=8"),
)


def test_deepep_is_accepted_by_name() -> None:
    (reason,) = unsupported(DEEPEP)
    assert reason.startswith("deepep is not supported: DeepEP's kernels have not run")
    accepted = replace(DEEPEP, allow_untested=("deepep",))
    assert unsupported(accepted) == []
    assert untested_transformer_options(accepted) == []
    assert without_deepep(accepted) == replace(accepted, transformer_options=())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "cpu"}, "sends bfloat16 between CUDA devices"),
        ({"dtype": "float32"}, "sends bfloat16 between CUDA devices"),
        ({"expert_parallel": 1}, "no effect where a rank has all experts"),
    ],
)
def test_what_deepep_cannot_be_beside_is_told(changes: dict[str, Any], words: str) -> None:
    (reason,) = unsupported(replace(DEEPEP, allow_untested=("deepep",), **changes))
    assert words in reason
