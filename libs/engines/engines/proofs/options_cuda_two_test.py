"""On two CUDA devices over NCCL: a proof of options runs where the run's ranks are, and sees a planted error."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, Qwen3MoeConfig

from engines import EngineConfig, LoraConfig
from engines.prove.options import prove_options, small_layout
from engines.testing.cuda_ranks import needs_devices

WORLD = 2
pytestmark = [pytest.mark.gpu2, needs_devices(WORLD)]
EXPERTS = Qwen3MoeConfig(
    num_hidden_layers=2, hidden_size=64, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=64,
    intermediate_size=96, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
)  # fmt: skip
OPTIONS: dict[str, Any] = {
    "plain": {},
    "adapters": {"lora": LoraConfig(rank=4)},
    "experts": {"expert_parallel": 2, "lora": LoraConfig(rank=4)},
    "copies": {"shard_ranks": 1},
    "host": {"optimizer_on_host": True, "parameters_on_host": True},
    "bfloat16": {"master_dtype": "bfloat16"},
    "context": {"context_parallel": "static:2"},
}


@pytest.fixture(autouse=True)
def certificates(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TESSERA_CERTIFICATES", str(tmp_path))


def of(options: dict[str, Any]) -> EngineConfig:
    return EngineConfig(device="cuda", prove="full", **options)


@pytest.mark.parametrize("name", OPTIONS)
def test_options_are_proven_on_the_devices_of_the_run(name: str) -> None:
    assert small_layout(of(OPTIONS[name]), WORLD).config.device == "cuda"
    certificate = prove_options(of(OPTIONS[name]), EXPERTS, WORLD)
    print(certificate, dict(certificate.differences), dict(certificate.place))
    assert certificate.holds, certificate.problems
    assert certificate.options["ranks"] == WORLD
    assert certificate.place["device"] == torch.cuda.get_device_name(0)


def test_the_text_part_of_a_multi_modal_type_is_proven_there() -> None:
    certificate = prove_options(of({}), AutoConfig.for_model("llava"), WORLD)
    print(certificate, dict(certificate.differences))
    assert certificate.holds, certificate.problems


@torch.no_grad()
def scale_a_shard(engine: Any) -> None:
    """Scale one rank's part of a matrix by 1 %."""
    if dist.get_rank() == 1:
        weight = dict(engine.executor.model.named_parameters())["model.layers.1.self_attn.v_proj.weight"]
        assert isinstance(weight, DTensor)
        weight.to_local().mul_(1.01)


def test_a_shard_that_differs_is_seen() -> None:
    certificate = prove_options(of({}), EXPERTS, WORLD, plant=scale_a_shard)
    assert any("an export differs from" in problem for problem in certificate.problems), certificate
    assert certificate.log_probs > 1e-3
