"""Learning rates by group on Megatron's parameters, in one process."""

from typing import Any

import pytest

from engines.proofs.megatron_layouts import LENGTHS, LayoutCase, engine_of, largest_difference
from engines.testing.executors import weights
from engines.testing.one_megatron_rank import one_megatron_rank  # noqa: F401  each test here has a group
from engines.tiny import tiny_batch
from objectives import SFT

CASE = LayoutCase("Qwen3.5")


def test_parameters_have_the_learning_rates_that_patterns_give_them() -> None:
    """The weights of FSDP2's steps; rates that split what Megatron holds as one are refused."""
    rates = ("embed_tokens=3e-2", r"layers\.0\.=1e-3", "norm=0")
    # A large eps: with Adam's usual one a gradient of nearly zero moves a weight by its rounding error's sign.
    schedule: dict[str, Any] = {"lr_schedule": "linear", "warmup_steps": 2, "total_steps": 4, "eps": 1e-2}
    built = [engine_of(CASE, which, learning_rates=rates, **schedule) for which in ("megatron", "fsdp2")]
    plain = engine_of(CASE, **schedule)
    for engine in (*built, plain):
        for seed in range(3):
            engine.train_batch(tiny_batch(list(LENGTHS), seed=seed), SFT())
    assert largest_difference(*(weights(engine) for engine in built)) < 1e-5
    assert largest_difference(weights(built[0]), weights(plain)) > 1e-3
    with pytest.raises(ValueError, match=r"q_proj.* different rates, and Megatron holds them as one parameter"):
        engine_of(CASE, learning_rates=("q_proj=1e-3",))
