"""On one CUDA device: layers at true width in bfloat16 are as near to the plain result as stock transformers."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from engines.config import EngineConfig
from engines.launch import ensure_group
from engines.proofs.device import prove_device
from engines.tiny import FUSED_SIZES, tiny_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
QWEN3_8B = {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8}
GEMMA_3_1B = {"hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4, "num_key_value_heads": 1}
QWEN3_30B_A3B = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 128}
CONFIGS: dict[str, Any] = {
    "qwen3": {**QWEN3_8B, "num_hidden_layers": 36, "vocab_size": 151936, "head_dim": 128},
    "gemma3_text": {**GEMMA_3_1B, "num_hidden_layers": 26, "head_dim": 256, "sliding_window": 512},
    "qwen3_moe": {**QWEN3_30B_A3B, "num_hidden_layers": 48, "num_key_value_heads": 4, "head_dim": 128},
    "mistral": {},
    "smollm3": {},
    "olmo3": {},
    "phi3": {},
    "granite": {},
}


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    made = ensure_group("cuda")
    yield
    if made:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", CONFIGS)
def test_true_width(kind: str) -> None:
    certificate = prove_device(EngineConfig(device="cuda"), CONFIG_MAPPING[kind](**CONFIGS[kind]))
    print(certificate, certificate.stock_error, dict(certificate.sensitivity))
    assert certificate.holds, certificate.problems


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_delta_nets_at_sizes_of_the_fused_kernels(kind: str) -> None:
    certificate = prove_device(EngineConfig(device="cuda"), tiny_config(kind, **FUSED_SIZES))
    print(certificate, certificate.stock_error, dict(certificate.sensitivity))
    assert certificate.holds, certificate.problems
