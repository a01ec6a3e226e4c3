"""Named settings of the sft app."""

from apps.sft.config import DataConfig, SftConfig
from engines import EngineConfig

QUICKSTART = SftConfig(
    recipe="quickstart",
    data=DataConfig(max_tokens=256),
    engine=EngineConfig(device="cpu", lr=6e-3, warmup_steps=30),
)

FINETUNE = SftConfig(
    recipe="finetune",
    engine=EngineConfig(lr=1e-5, warmup_steps=10, gradient_checkpointing=True),
)

RECIPES = {config.recipe: config for config in (QUICKSTART, FINETUNE)}
