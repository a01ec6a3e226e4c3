"""The pictures of quickstart-image, shown to vLLM in a process and an environment of its own; all else is the same."""

import functools
from dataclasses import replace

from apps.common.cluster import Cluster, RolloutLayout
from apps.grpo.recipe import Recipe
from apps.grpo.recipes import quickstart_image
from apps.quickstart.model import served_config
from apps.quickstart.vision import ensure_vision_model

RECIPE = Recipe(
    config=replace(
        quickstart_image.RECIPE.config,
        recipe="quickstart-image-vllm",
        cluster=Cluster(rollout=RolloutLayout(engine="vllm")),
    ),
    make_tasks=quickstart_image.RECIPE.make_tasks,
    make_model=functools.partial(ensure_vision_model, make_config=served_config),
    demonstrations=quickstart_image.RECIPE.demonstrations,
)
