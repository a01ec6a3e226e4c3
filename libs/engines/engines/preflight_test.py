"""What a build refuses for its model is told before it, all at once, from an empty module that stays as it is."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from engines import EngineConfig, LoraConfig
from engines.capability import refuse_unsupported, unsupported
from engines.loading import LoadedModel, open_model
from engines.preflight import refusals


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = Qwen3_5TextConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, vocab_size=64, linear_num_key_heads=2, linear_num_value_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    path = tmp_path_factory.mktemp("models") / "tiny"
    Qwen3_5ForCausalLM(config).save_pretrained(path)
    return path


def opened(model: Path, **settings: Any) -> tuple[EngineConfig, LoadedModel]:
    config = EngineConfig(device="cpu", model=str(model), **settings)
    return config, open_model(config)


def test_what_can_be_built_is_not_refused(model: Path) -> None:
    for settings in (
        {},
        {"lora": LoraConfig(rank=4)},
        {"learning_rates": ("embed_tokens=0.1",)},
        {"backend": "megatron", "tensor_parallel": 2},
        {"context_parallel": "static:2"},
    ):
        config, loaded = opened(model, **settings)
        before = {name: (p.shape, p.requires_grad) for name, p in loaded.module.named_parameters()}
        assert refusals(config, loaded.config, 2, loaded) == []
        assert {name: (p.shape, p.requires_grad) for name, p in loaded.module.named_parameters()} == before


@pytest.mark.parametrize(
    ("settings", "ranks", "texts"),
    [
        (
            {"expert_parallel": 2, "compile": "on", "weights": "replicated", "optimizer_on_host": True},
            2,
            [
                "weights='replicated' keeps all experts on every rank",
                "weights='replicated' cannot be had: replicated weights keep their states on the device",
                "compile='on' cannot be had",
                "expert_parallel is for models with experts",
            ],
        ),
        (
            {"expert_parallel": 2, "compile": "on", "learning_rates": ("nothing=1",), "router_forwards_ahead": 1},
            2,
            [
                "expert_parallel is for models with experts",
                "compile='on' cannot be had",
                "no parameter's name on disk",
                "router_forwards_ahead spares the pass that a router's balancing loss needs",
            ],
        ),
        (
            {"lora": LoraConfig(rank=4, targets=("wqkv",)), "weights": "replicated", "context_parallel": "static:3"},
            2,
            ["no linear layer 'wqkv'", "adapters and the weights under them", "needs a multiple of 3 ranks"],
        ),
        (
            {"backend": "megatron", "tensor_parallel": 4, "transformer_options": ("hidden_size=3",)},
            4,
            ["key-value heads 2 cannot be split over tensor_parallel=4", "hidden_size follows from the model"],
        ),
    ],
)
def test_all_that_a_build_would_refuse_is_told_at_once(
    model: Path, settings: dict[str, Any], ranks: int, texts: list[str]
) -> None:
    config, loaded = opened(model, **settings)
    found = refusals(config, loaded.config, ranks, loaded)
    assert len(found) == len(texts)
    for text in texts:
        assert any(text in line for line in found), found


def test_unsupported_features_and_conflicts_are_all_told() -> None:
    config = EngineConfig(
        device="cpu",
        tensor_parallel=2,
        expert_parallel=2,
        master_dtype="bfloat16",
        megatron_optimizer="torch",
        prove="off",
    )
    texts = [
        "tensor_parallel is not supported: FSDP2 shards",
        "master_dtype='bfloat16' has not been run with expert_parallel",
        "megatron_optimizer is Megatron's",
    ]
    assert [any(text in line for line in unsupported(config)) for text in texts] == [True] * 3
    with pytest.raises(ValueError, match=r"tensor_parallel is not supported.*; .*master_dtype.*; .*megatron_optimizer"):
        refuse_unsupported(config)


def test_a_backend_that_is_not_installed_is_told_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, loaded = opened(model, backend="megatron", tensor_parallel=4)
    monkeypatch.setattr("engines.backends.find_spec", lambda name: None)
    (found,) = refusals(config, loaded.config, 4, loaded)
    assert "megatron-core is not installed" in found
