"""`--shrink`: a recipe of the grpo app on processes of this machine, with a tiny random model of its architecture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from apps.common.shrink.data import nested, write_image_rows, write_rows
from apps.common.shrink.fields import (
    Change,
    Difference,
    ProcessLimit,
    ShrunkLayout,
    apply_changes,
    engine_changes,
    steps_changes,
)
from apps.common.shrink.model import make_model, tiny_shape
from apps.common.shrink.varied import with_varied_reward
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from apps.grpo.tasks.prompt_tasks import IMAGE_MARK
from apps.quickstart.arithmetic import Problem
from apps.quickstart.model import ensure_tiny_model
from apps.quickstart.shapes import ImageProblem

STEPS, TOKENS = 4, 128
DIGITS = 20
"""Of the longest numbers: a prompt of them is a third of the longest sequence."""


def shrink(config: GrpoConfig, recipe: Recipe, most: ProcessLimit) -> tuple[GrpoConfig, tuple[Difference, ...]]:
    """Return the configuration of a recipe in small, and every field that differs.

    Raises:
        ValueError: see `apps.common.shrink.fields.ShrunkLayout.of`.
    """
    short = min(config.max_episode_tokens, TOKENS)
    ranks = config.nproc_per_node * config.cluster.pools.nodes
    small = ShrunkLayout.of(config.engine, ranks, config.max_episode_tokens, short, most)
    changes = engine_changes(small, config.engine, config.cluster) + steps_changes(config.engine, STEPS)
    sizes = _sizes(config, short)
    if recipe.make_model is None:  # it reads prompts from a file
        sizes["data.max_prompt_tokens"] = min(config.data.max_prompt_tokens, short // 2)
    changes += [Change(name, "size", value) for name, value in sizes.items()]
    return apply_changes(config, changes)


def shrunk_recipe(config: GrpoConfig, recipe: Recipe) -> Recipe:
    """Return the recipe of a shrunk configuration, whose model and data are small too, with a reward that varies."""
    if recipe.make_tasks is not None:
        recipe = replace(recipe, make_tasks=with_varied_reward(recipe.make_tasks))
    if recipe.origin is None:
        return recipe
    shape = tiny_shape(recipe.origin.shape, config.engine.pipeline_parallel, config.engine.tensor_parallel)
    return replace(recipe, origin=replace(recipe.origin, shape=shape, dataset_rows=None))


def supplied(config: GrpoConfig, recipe: Recipe, run_dir: Path) -> GrpoConfig:
    """Return the configuration with a model and data in the recipe's own columns, made in the run folder if missing.

    Raises:
        ValueError: a model is named.
    """
    if config.model is not None:
        raise ValueError("--shrink makes a tiny model of the recipe's architecture: leave --model out")
    config = replace(config, run_dir=run_dir)
    if recipe.make_model is not None:
        return config
    run_dir.mkdir(parents=True, exist_ok=True)
    if recipe.origin is None:
        model = ensure_tiny_model(run_dir / "model", config.seed)
    else:
        model = make_model(run_dir / "model", recipe.origin.shape, config.seed)
    if config.data.data is not None:
        return replace(config, model=model)
    data = replace(config.data, data=_write_data(config, recipe, run_dir / "data.jsonl"))
    return replace(config, model=model, data=data)


def _write_data(config: GrpoConfig, recipe: Recipe, path: Path) -> Path:
    """Write sums, or pictures where the recipe's rows have images, in the recipe's columns."""
    data, images = config.data, config.cluster.media.images_column

    def row(problem: Problem | ImageProblem) -> dict[str, Any]:
        text = f"{IMAGE_MARK}{problem.question}" if isinstance(problem, ImageProblem) else problem.question
        question = text if recipe.origin is None else [{"role": "user", "content": text}]
        return nested(data.prompt_column, question) | nested(data.answer_column, problem.answer)

    if images is None:
        return write_rows(path, row, DIGITS, config.seed)
    return write_image_rows(path, lambda problem, picture: row(problem) | {images: [picture]}, config.seed)


def _sizes(config: GrpoConfig, short: int) -> dict[str, Any]:
    schedule, rollout, warm = config.cluster.schedule, config.cluster.rollout, config.warm_start
    window = schedule.parameter_sync_step
    every = window * -(-2 // window)  # held-out answers and checkpoints are of weights that the sampler has
    sizes: dict[str, Any] = {
        "steps": min(config.steps, max(STEPS, every)),
        "prompts_per_step": min(config.prompts_per_step, 4),
        "group_size": min(config.group_size, 4),
        "mini_batches": min(config.mini_batches, 2),
        "epochs": min(config.epochs, 2),
        "eval_every": min(config.eval_every, every),
        "save_every": min(config.save_every, every),
        "max_episode_tokens": short,
        "data.eval_prompts": min(config.data.eval_prompts, 4),
        "sampling.max_new_tokens": min(config.sampling.max_new_tokens, short // 8),
    }
    if warm.steps:
        sizes |= {
            "warm_start.steps": min(warm.steps, 2),
            "warm_start.eval_every": min(warm.eval_every, 2),
            "warm_start.eval_prompts": min(warm.eval_prompts, 4),
            "warm_start.batch_size": min(warm.batch_size, 8),
            "warm_start.warmup_steps": min(warm.warmup_steps, 1),
        }
    for name in ("max_model_tokens", "max_batched_tokens"):
        value = getattr(rollout, name)
        sizes[f"cluster.rollout.{name}"] = None if value is None else min(value, short)
    return sizes
