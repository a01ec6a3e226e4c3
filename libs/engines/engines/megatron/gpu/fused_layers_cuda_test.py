"""On one CUDA device: a Megatron stage of fused pieces gives the plain stage's steps, and compiles once."""

import pytest
import torch

from engines import EngineConfig, build_engine
from engines.fast.compiling import compilations
from engines.testing.megatron_curves import curve
from engines.testing.one_megatron_rank import one_megatron_gpu  # noqa: F401  each test here has a group
from engines.tiny import FUSED_SIZES, tiny_batch, tiny_model
from objectives import GRPO, SFT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
OBJECTIVE = GRPO(kl_coef=0.1, entropy_coef=0.01)


def test_a_bfloat16_curve_is_that_of_plain_layers() -> None:
    exact = curve("cuda", "float32", "megatron", "dense", OBJECTIVE)
    plain = curve("cuda", "bfloat16", "megatron", "dense", OBJECTIVE, compile="off")
    fused = curve("cuda", "bfloat16", "megatron", "dense", OBJECTIVE)
    print(exact, plain, fused)
    for wanted, one, other in zip(exact, plain, fused, strict=True):
        assert wanted[2] == one[2] == other[2] == 0.0
        assert other[0] == pytest.approx(one[0], rel=5e-3, abs=5e-3)
        assert other[1] == pytest.approx(one[1], rel=0.03)
        assert other[0] == pytest.approx(wanted[0], rel=5e-3, abs=5e-3)
        assert other[1] == pytest.approx(wanted[1], rel=0.03)


def test_other_lengths_compile_nothing() -> None:
    config = EngineConfig(backend="megatron", device="cuda", max_tokens_per_rank=1024)
    engine = build_engine(config, tiny_model(scale=1.0, **FUSED_SIZES))
    assert engine.state_summary()["compiled"] == "yes"
    counts = []
    for lengths in ([700, 5], [333, 64, 1], [945], [120, 340, 60]):
        engine.train_batch(tiny_batch(lengths, vocab=FUSED_SIZES["vocab_size"]), SFT())
        counts.append(compilations())
    assert counts[0] > 0
    assert counts[1:] == counts[:1] * 3
