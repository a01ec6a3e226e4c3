"""A tiny model imitates two-digit sums on a CPU, in about a minute."""

from apps.sft.config import DataConfig, SftConfig
from apps.sft.recipe import Recipe
from engines import EngineConfig

RECIPE = Recipe(
    SftConfig(
        recipe="quickstart",
        data=DataConfig(max_tokens=256),
        eval_rows=256,
        engine=EngineConfig(device="cpu", lr=6e-3, warmup_steps=30),
    ),
    synthetic=True,
)
