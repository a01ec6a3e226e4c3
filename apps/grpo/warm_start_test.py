"""What the warm start takes of the run's engine, and what it does not."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from apps.grpo.config import GrpoConfig, WarmStart
from apps.grpo.warm_start import look_at, warm_start_engine
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


@pytest.mark.parametrize(
    ("accuracy", "last", "asked"),
    [(0.0, False, [3]), (0.24, False, [3]), (0.25, False, [3, 10]), (0.9, False, [3, 10]), (0.0, True, [10])],
)
def test_all_prompts_are_asked_where_a_quarter_came_to_half(accuracy: float, last: bool, asked: list[int]) -> None:
    counts: list[int] = []

    class Session:
        def evaluate(self, count: int) -> Any:
            counts.append(count)
            return SimpleNamespace(accuracy=accuracy, asked=count)

    session: Any = Session()
    evaluation: Any = look_at(session, WarmStart(until_accuracy=0.5, eval_prompts=10), last)
    assert (evaluation.asked, counts) == (asked[-1], asked)
