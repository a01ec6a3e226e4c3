"""Learning rates by hand."""

from typing import Any

import pytest

from engines.config import EngineConfig
from engines.execution.lr_schedule import learning_rate


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        ({}, [8.0, 8.0, 8.0]),
        ({"warmup_steps": 4}, [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]),
        ({"warmup_steps": 1}, [8.0, 8.0]),
        ({"lr_schedule": "linear", "total_steps": 4}, [8.0, 6.0, 4.0, 2.0, 0.0, 0.0]),
        (
            {"lr_schedule": "linear", "warmup_steps": 2, "total_steps": 4, "min_lr_ratio": 0.25},
            [4.0, 8.0, 8.0, 5.0, 2.0, 2.0, 2.0],
        ),
        (
            {"lr_schedule": "cosine", "warmup_steps": 2, "total_steps": 6, "min_lr_ratio": 0.5},
            [4.0, 8.0, 8.0, 6 + 2**0.5, 6.0, 6 - 2**0.5, 4.0, 4.0, 4.0],
        ),
        ({"lr_schedule": "cosine", "total_steps": 2}, [8.0, 4.0, 0.0, 0.0]),
    ],
)
def test_by_hand(options: dict[str, Any], rates: list[float]) -> None:
    config = EngineConfig(lr=8.0, **options)
    assert [learning_rate(config, step) for step in range(len(rates))] == pytest.approx(rates, abs=1e-12)
