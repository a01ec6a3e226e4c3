"""Kernels are warmed by steps that leave the weights as they were, whatever the size of the gradient."""

import pytest

from engines.config import EngineConfig
from engines.proofs.warm_kernels import warm_kernels
from engines.tiny import tiny_config


@pytest.mark.parametrize("kind", ["attention", "dense"])
def test_it_passes_and_steps_twice_at_the_size_of_a_micro_batch(kind: str) -> None:
    wide = tiny_config(kind, num_hidden_layers=8, hidden_size=128, vocab_size=512)
    found = warm_kernels(EngineConfig(device="cpu", dtype="bfloat16", max_tokens_per_rank=2000), wide)
    assert 1200 < found["tokens"] <= 2000
    assert found["later_graphs"] == 0
