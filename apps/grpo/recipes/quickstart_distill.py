"""Two-digit sums from a teacher: a model that was shown many teaches one that was shown few; rewards are not used."""

from __future__ import annotations

from dataclasses import replace

from apps.grpo.config import TeacherConfig, TeacherWarmStart
from apps.grpo.recipes import quickstart
from engines import EngineConfig

_SHOWN = replace(quickstart.RECIPE.config.warm_start, lr=6e-3)

RECIPE = replace(
    quickstart.RECIPE,
    config=replace(
        quickstart.RECIPE.config,
        recipe="quickstart-distill",
        steps=100,
        mini_batches=4,
        prompts_per_step=256,
        group_size=1,
        eval_every=20,
        save_every=50,
        warm_start=replace(_SHOWN, until_accuracy=0.2, eval_prompts=128),
        teachers=TeacherConfig(
            teacher_warm_start=TeacherWarmStart(**vars(replace(_SHOWN, until_accuracy=0.8, eval_every=10)))
        ),
        # A constant rate ends as far from the teacher as a step's noise takes it: 6 points at 3e-3.
        engine=EngineConfig(device="cpu", lr=6e-3, lr_schedule="linear", total_steps=400),
    ),
)
