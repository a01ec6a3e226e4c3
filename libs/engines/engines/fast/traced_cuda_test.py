"""On one GPU: stock layers compiled as they are against the plain path and float32."""

from typing import Any

import pytest
import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from engines import EngineConfig, build_engine
from engines.fast.compiling import compilations
from engines.fast.support import TRACED
from engines.launch import ensure_group
from engines.testing.gradients import error, gradients
from engines.tiny import tiny_batch
from objectives import SFT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 4,
    "vocab_size": 512,
}
WINDOW = {"sliding_window": 64}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "olmo2": {},
    "phi3": WINDOW | {"pad_token_id": 0},
    "gemma3_text": WINDOW | {"query_pre_attn_scalar": 64},
    "qwen2": {},
}
LENGTHS = [700, 5, 333, 64, 1, 945]


def engine(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**{**SIZES, **KINDS[kind]})
    return build_engine(EngineConfig(device="cuda", lr=1e-3, max_tokens_per_rank=2048, **options), config)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_as_near_to_float32_as_plain_ones(kind: str) -> None:
    ensure_group("cuda")
    data = tiny_batch(LENGTHS, vocab=512)
    exact_loss, exact = gradients(engine(kind, dtype="float32", compile="off"), data, SFT())
    plain_loss, plain = gradients(engine(kind, compile="off"), data, SFT())
    built = engine(kind, compile="on")
    assert built.executor.compiled == TRACED
    traced_loss, traced = gradients(built, data, SFT())
    print({"loss": (exact_loss, plain_loss, traced_loss), "plain": error(plain, exact), "traced": error(traced, exact)})
    assert traced_loss == pytest.approx(exact_loss, rel=2e-3)
    assert error(traced, exact) <= 1.05 * error(plain, exact)


def test_another_batch_compiles_nothing() -> None:
    ensure_group("cuda")
    built = engine("llama", compile="on")
    built.train_batch(tiny_batch(LENGTHS, vocab=512), SFT())
    before = compilations()
    for lengths in ([100, 3], [2000], [64] * 20):
        built.train_batch(tiny_batch(lengths, vocab=512), SFT())
    assert compilations() == before
