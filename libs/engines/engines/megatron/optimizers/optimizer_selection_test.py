"""Which optimizer updates Megatron's weights, and what is said of it."""

import logging

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.megatron.optimizers.optimizer_selection import choose
from engines.proofs.megatron_layouts import LayoutCase, engine_of, model_of
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group


def test_what_was_chosen_and_why_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config = EngineConfig(backend="megatron")
    cuda, cpu, dtype = torch.device("cuda"), torch.device("cpu"), torch.bfloat16
    assert choose(config, cuda, dtype)[0]
    assert not choose(config, cpu, dtype)[0]
    for options, words in (
        ({"optimizer_on_host": True}, "on the host"),
        ({"learning_rates": ("norm=0",)}, "learning_rates"),
        ({"device": "npu"}, "NPU"),
    ):
        own, reason = choose(EngineConfig(backend="megatron", **options), cuda, dtype)
        assert not own
        assert words in reason
        settings = EngineConfig(backend="megatron", megatron_optimizer="core", **options)
        with pytest.raises(
            ValueError, match=f"megatron_optimizer='core' cannot be used: .*{words}.*; set it to 'auto'"
        ):
            choose(settings, cuda, dtype)
    assert not choose(EngineConfig(backend="megatron", distributed_optimizer=True), cuda, torch.float64)[0]
    with caplog.at_level(logging.INFO):
        for kind, words in (
            ("auto", "torch's AdamW (on device cpu megatron-core's would run torch's AdamW too"),
            ("torch", "torch's AdamW (megatron_optimizer='torch')"),
            ("core", "megatron-core's FP32Optimizer over torch's AdamW (megatron_optimizer='core')"),
        ):
            assert words in engine_of(LayoutCase("Qwen3.5"), megatron_optimizer=kind).state_summary()["optimizer"]
            assert words in caplog.text
    scorer = build_engine(config, model_of("Qwen3.5"), trainable=False)
    assert scorer.state_summary()["optimizer"] == "none: the engine only scores"
