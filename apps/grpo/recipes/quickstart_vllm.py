"""The quickstart's sums, sampled by vLLM in a process and an environment of its own; all else is the same."""

from dataclasses import replace
from pathlib import Path

from apps.common.cluster import Cluster, RolloutLayout
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart


def make_model(directory: Path, seed: int) -> Path:
    """Return the directory, with a tiny Qwen3.5 whose sizes vLLM takes."""
    from apps.quickstart.model import ensure_tiny_model, served_config  # slow to load

    return ensure_tiny_model(directory, seed, served_config)


RECIPE = Recipe(
    config=replace(
        quickstart.RECIPE.config,
        recipe="quickstart-vllm",
        warm_start=replace(quickstart.RECIPE.config.warm_start, until_accuracy=0.3),  # these heads learn in leaps
        cluster=Cluster(rollout=RolloutLayout(engine="vllm")),
    ),
    make_tasks=quickstart.make_tasks,
    make_model=make_model,
    demonstrations=quickstart.RECIPE.demonstrations,
)
