"""What the warm start takes of the run's engine, and what it does not."""

from dataclasses import replace
from typing import Any

import pytest

from apps.grpo.config import GrpoConfig
from apps.grpo.warm_start import warm_start_engine
from engines import EngineConfig


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"lr_schedule": "linear", "total_steps": 240, "min_lr_ratio": 0.1},
        {"lr_schedule": "cosine", "total_steps": 50, "warmup_steps": 40},
        {"learning_rates": ("embed_tokens=1e-5",)},
    ],
)
def test_its_own_rate_is_constant_after_its_own_warmup(given: dict[str, Any]) -> None:
    config = GrpoConfig(engine=EngineConfig(device="cpu", betas=(0.8, 0.9), max_tokens_per_rank=99, **given))
    warm = config.warm_start
    own: dict[str, Any] = {"lr": warm.lr, "warmup_steps": warm.warmup_steps, "learning_rates": ()}
    schedule: dict[str, Any] = {"lr_schedule": "constant", "total_steps": None, "min_lr_ratio": 0.0}
    assert warm_start_engine(config) == replace(config.engine, **own, **schedule)


def test_no_sampler_chose_experts_for_a_demonstration() -> None:
    config = GrpoConfig(engine=EngineConfig(device="cpu", routing_replay=True))
    assert not warm_start_engine(config).routing_replay
