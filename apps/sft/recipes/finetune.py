"""Conversations of a file, for a real checkpoint: --model DIR --data FILE."""

from apps.sft.config import SftConfig
from apps.sft.recipe import Recipe
from engines import EngineConfig

RECIPE = Recipe(
    SftConfig(
        recipe="finetune",
        engine=EngineConfig(lr=1e-5, warmup_steps=10, gradient_checkpointing=True),
    )
)
