"""Compiled stock layers under FSDP2, on ranks that share sequences, with adapters and recomputed layers."""

from typing import Any

import pytest

from engines import LoraConfig, TrainEngine
from engines.fast.traced_layers import use_traced_layers
from engines.proofs.forked_ranks import launch_forked
from engines.testing import executors
from engines.tiny import tiny_batch
from objectives import SFT

SETTINGS: dict[str, dict[str, Any]] = {
    "sharded": {},
    "context parallel": {"context_parallel": "static:2"},
    "adapters": {"lora": LoraConfig(rank=2)},
    "recomputed": {"gradient_checkpointing": True},
}


def losses(engine: TrainEngine) -> list[float]:
    metrics = [engine.train_batch(tiny_batch([29, 3, 12, 5, 17, 2, 1, 6, 4]), SFT()) for _ in range(3)]
    return [float(one[name]) for one in metrics for name in ("loss", "grad_norm")]


def on_two_ranks(options: dict[str, Any]) -> tuple[list[float], list[float]]:
    """Train plain layers, then compiled ones."""
    plain, compiled = (executors.engine(**{"max_tokens_per_rank": 40, **options}) for _ in range(2))
    use_traced_layers(compiled.executor.model, "aot_eager")  # type: ignore[attr-defined]
    return losses(plain), losses(compiled)


@pytest.mark.parametrize("name", SETTINGS)
def test_three_steps_equal_plain_ones(name: str) -> None:
    plain, compiled = launch_forked(on_two_ranks, (SETTINGS[name],), world_size=2)
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert len(set(plain)) == len(plain)  # it trains
