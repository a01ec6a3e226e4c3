"""The learning rate as a pure function of the step."""

import math

from engines.config import EngineConfig


def learning_rate(config: EngineConfig, step: int) -> float:
    """Return the rate of optimizer step `step`, counted from 0: linear warm-up, then constant, linear or cosine decay.

    The first of W warm-up steps uses lr / W, the last lr; decay ends at lr * min_lr_ratio at total_steps and stays
    there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.lr_schedule == "constant" or config.total_steps is None:
        return config.lr
    done = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    share = 1 - done if config.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * share)
