"""Every reason for which layers are not compiled, or weights not replicated, from plain data: no device is asked."""

from typing import Any

import pytest
import torch

from engines import EngineConfig, LoraConfig
from engines.capability import Supported, Unsupported
from engines.fast.settings import settings_refusal
from engines.fast.support import (
    TRACED,
    Machine,
    Refusal,
    compiled_layers,
    machine_refusal,
    model_refusal,
    replicated_weights,
    traced_machine_refusal,
    use_compiled_layers,
    use_replicated_weights,
)
from engines.tiny import FUSED_SIZES, tiny_config


def proven(config: Any) -> str | None:
    """Say that compiled layers equal plain ones: `engines.prove.traced` compares them."""
    del config
    return None


HOPPER = Machine("cuda", torch.bfloat16, 9)
MACHINES: list[tuple[Machine, str]] = [
    (Machine("cpu"), "on a CPU the plain layers are as fast"),
    (Machine("npu"), "on a CPU the plain layers are as fast"),
    (Machine("cuda", torch.float32, 9), "compute in bfloat16"),
    (Machine("cuda", torch.bfloat16, 8), r"Hopper \(compute capability 9.0\)"),
    (Machine("cuda", torch.bfloat16, 10), r"Hopper \(compute capability 9.0\)"),
    (Machine("cuda", torch.bfloat16, 9, ("flash_qla", "triton")), "^flash-qla is not installed"),
    (Machine("cuda", torch.bfloat16, 9, ("triton",)), "^triton is not installed"),
]


def text(**changes: Any) -> Any:
    return tiny_config("dense", **{**FUSED_SIZES, **changes}).get_text_config()


@pytest.mark.parametrize(("machine", "reason"), MACHINES)
def test_a_machine_without_the_kernels_says_what_it_lacks(machine: Machine, reason: str) -> None:
    assert machine_refusal(HOPPER, text()) is None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(machine_refusal(machine, text()))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"linear_key_head_dim": 64}, r"heads of 128 features, the model \[64, 128\]"),
        ({"linear_value_head_dim": 256}, r"heads of 128 features, the model \[128, 256\]"),
        ({"head_dim": 264}, "at most 256 features, a multiple of 8; the model 264"),
        ({"head_dim": 60}, "at most 256 features, a multiple of 8; the model 60"),
    ],
)
def test_heads_of_another_size_are_named(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        raise ValueError(machine_refusal(HOPPER, text(**changes)))


def test_sizes_of_experts_that_no_grouped_product_takes_are_named() -> None:
    sizes = {**FUSED_SIZES, "shared_expert_intermediate_size": 20}  # the shared one is no grouped product
    assert machine_refusal(HOPPER, tiny_config("moe", **sizes)) is None
    assert "multiples of 8, the model 20 and 256" in str(
        machine_refusal(HOPPER, tiny_config("moe", **FUSED_SIZES, moe_intermediate_size=20))
    )


def test_layers_of_attention_alone_need_no_heads_of_the_delta_rule() -> None:
    sizes = {"linear_key_head_dim": 64, "layer_types": ["full_attention"] * text().num_hidden_layers}
    assert machine_refusal(HOPPER, text(**sizes)) is None
    alone = tiny_config("attention")
    assert machine_refusal(Machine("cuda", torch.bfloat16, 9, ("flash_qla",)), alone) is None
    assert "ran on no GPU but Hopper's" in str(machine_refusal(Machine("cuda", torch.bfloat16, 8), alone))
    assert machine_refusal(Machine("cuda", torch.bfloat16, 9, ("triton",)), alone) == "triton is not installed"


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("next", {}, "the layers of qwen3_next are compiled where compile='on' asks for it"),
        ("attention_moe", {"use_sliding_window": True, "sliding_window": 8}, "attention in windows"),
        ("dense", {"attention_bias": True}, "attention with biases"),
        ("dense", {"hidden_act": "gelu"}, "the activation is gelu"),
        ("attention", {"use_sliding_window": True, "max_window_layers": 2}, "attention in windows"),
    ],
)
def test_another_model_is_named(kind: str, changes: dict[str, Any], reason: str) -> None:
    assert model_refusal(tiny_config("dense")) is None
    for other in ("attention", "moe", "attention_moe"):
        assert model_refusal(tiny_config(other)) is None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(model_refusal(tiny_config(kind, **changes)))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"vision": "frozen"}, "where compile='on' asks for it"),
        ({"gradient_checkpointing": True, "activation_offload": True}, "are not moved to the host"),
        ({"batching": "padded"}, "set batching='packed'"),
        ({"context_parallel": "dynamic"}, "whose ranks share sequences"),
        ({"context_parallel": "static:2"}, "whose ranks share sequences"),
    ],
)
def test_settings_are_named(options: dict[str, Any], reason: str) -> None:
    assert settings_refusal(EngineConfig(context_parallel="static:1")) is None
    assert settings_refusal(EngineConfig(vision="frozen", compile="on")) is None
    with pytest.raises(ValueError, match=reason):
        raise ValueError(settings_refusal(EngineConfig(**options)))


@pytest.mark.parametrize(
    ("machine", "reason"),
    [
        (Machine("cuda", torch.bfloat16, 8), None),
        (Machine("cuda", torch.float32, 9, ("flash_qla",)), None),
        (Machine("cuda", torch.bfloat16, 7), "compute capability 8.0 and newer"),
        (Machine("cuda", torch.bfloat16, 9, ("triton",)), "triton is not installed"),
        (Machine("cpu"), "on a CPU the plain layers are as fast"),
    ],
)
def test_layers_are_compiled_as_they_are_on_any_gpu_with_flash_attention(machine: Machine, reason: str | None) -> None:
    assert reason == (traced := traced_machine_refusal(machine)) or (reason is not None and reason in str(traced))


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_another_type_is_compiled_where_it_is_asked_for(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "of", staticmethod(lambda *_: Machine(device, torch.bfloat16, 8)))

    def answer(kind: str, refusal: Refusal = proven, **options: Any) -> Supported | Unsupported:
        return compiled_layers(EngineConfig(**options), tiny_config(kind), torch.device("cpu"), refusal)

    assert "compile='on' asks for it" in str(answer("next"))
    expected = TRACED if device == "cuda" else Unsupported("on a CPU the plain layers are as fast")
    assert type(answer("next", compile="on")) is type(expected)
    assert (answer("dense", compile="on", context_parallel="static:2") == TRACED) is (device == "cuda")
    for options in ({"batching": "padded"}, {"gradient_checkpointing": True, "activation_offload": True}):
        assert isinstance(answer("next", compile="on", **options), Unsupported)
    unequal = answer("next", lambda _: "they differ", compile="on")
    assert isinstance(unequal, Unsupported)
    assert ("they differ" in unequal.reason) is (device == "cuda")


@pytest.mark.parametrize("kind", ["moe", "attention_moe"])
def test_layers_with_experts_are_compiled_where_it_is_asked_for(kind: str) -> None:
    cpu, config = torch.device("cpu"), tiny_config(kind)
    answer = compiled_layers(EngineConfig(), config, cpu)
    assert answer == Unsupported("layers with experts are compiled where compile='on' asks for it")
    with pytest.raises(ValueError, match="compile='on' cannot be had: on a CPU the plain layers are as fast"):
        use_compiled_layers(EngineConfig(compile="on"), config, cpu, proven)


def test_what_is_asked_for_is_had_or_refused_with_the_reason() -> None:
    cpu, config = torch.device("cpu"), tiny_config("dense")
    assert use_compiled_layers(EngineConfig(compile="off"), config, cpu, proven) == Unsupported("compile='off'")
    assert use_compiled_layers(EngineConfig(), config, cpu, proven) == compiled_layers(EngineConfig(), config, cpu)
    with pytest.raises(ValueError, match="compile='on' cannot be had: on a CPU the plain layers are as fast; use"):
        use_compiled_layers(EngineConfig(compile="on"), config, cpu, proven)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shard_ranks": 1}, "shard_ranks asks for sharded weights"),
        ({"vision": "trained"}, "a vision tower is sharded"),
        ({"lora": LoraConfig(rank=2)}, "adapters and the weights under them are sharded"),
        ({"moments_dtype": "bfloat16"}, "keep float32 moments"),
        ({"optimizer_on_host": True}, "keep their states on the device"),
        ({"optimizer_on_host": True, "parameters_on_host": True}, "replicated weights are on the device"),
        ({"master_dtype": "bfloat16"}, "keep float32 masters"),
    ],
)
def test_weights_that_cannot_be_replicated_say_why(options: dict[str, Any], reason: str) -> None:
    cpu = torch.device("cpu")
    assert isinstance(use_replicated_weights(EngineConfig(weights="replicated"), cpu, 2), Supported)
    assert use_replicated_weights(EngineConfig(weights="sharded"), cpu, 1) == Unsupported("weights='sharded'")
    refused = use_replicated_weights(EngineConfig(), cpu, 1)
    assert refused == Unsupported("one process on a CPU has the weights whole, and several share them")
    answer = replicated_weights(EngineConfig(**options), cpu)
    assert isinstance(answer, Unsupported)
    assert reason in answer.reason
