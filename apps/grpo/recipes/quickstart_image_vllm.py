"""The pictures of quickstart-image, shown to vLLM in a process and an environment of its own; all else is the same."""

from dataclasses import replace
from pathlib import Path

from apps.common.cluster import Cluster, RolloutLayout
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart_image


def make_model(directory: Path, seed: int) -> Path:
    """Return the directory, with a tiny Qwen3.5 that sees, whose sizes vLLM takes."""
    from apps.quickstart.model import served_config  # slow to load
    from apps.quickstart.vision import ensure_vision_model  # slow to load

    return ensure_vision_model(directory, seed, make_config=served_config)


RECIPE = Recipe(
    config=replace(
        quickstart_image.RECIPE.config,
        recipe="quickstart-image-vllm",
        cluster=Cluster(rollout=RolloutLayout(engine="vllm")),
    ),
    make_tasks=quickstart_image.RECIPE.make_tasks,
    make_model=make_model,
    demonstrations=quickstart_image.RECIPE.demonstrations,
)
