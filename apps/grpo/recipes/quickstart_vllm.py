"""The quickstart's sums, sampled by vLLM in a process and an environment of its own: its own heads, and their rates."""

from dataclasses import replace
from pathlib import Path

from apps.common.cluster import Cluster, RolloutLayout
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart
from engines import EngineConfig

_SHOWN = quickstart.RECIPE.config.warm_start


def make_model(directory: Path, seed: int) -> Path:
    """Return the directory, with a tiny Qwen3.5 whose sizes vLLM takes."""
    from apps.quickstart.model import ensure_tiny_model, served_config  # slow to load

    return ensure_tiny_model(directory, seed, served_config)


RECIPE = Recipe(
    config=replace(
        quickstart.RECIPE.config,
        recipe="quickstart-vllm",
        # These heads learn in leaps.
        warm_start=replace(_SHOWN, until_accuracy=0.3, eval_every=10, eval_prompts=128, lr=6e-3),
        engine=EngineConfig(device="cpu", lr=8e-4),
        cluster=Cluster(rollout=RolloutLayout(engine="vllm")),
    ),
    make_tasks=quickstart.make_tasks,
    make_model=make_model,
    demonstrations=quickstart.RECIPE.demonstrations,
)
