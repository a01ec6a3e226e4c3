"""`--shrink`: a recipe of the sft app on processes of this machine, with a tiny random model of its architecture."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from apps.common.shrink.data import nested, write_rows
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
from apps.quickstart.arithmetic import Problem
from apps.quickstart.demonstrations import demonstration
from apps.quickstart.model import ensure_tiny_model
from apps.sft.config import SftConfig
from apps.sft.recipe import Recipe

STEPS, TOKENS = 4, 256
DIGITS = 70
"""Of the longest numbers: question and answer are nearly the longest sequence."""


def shrink(config: SftConfig, recipe: Recipe, most: ProcessLimit) -> tuple[SftConfig, tuple[Difference, ...]]:
    """Return the configuration of a recipe in small, and every field that differs.

    Raises:
        ValueError: see `apps.common.shrink.fields.ShrunkLayout.of`.
    """
    longest, short = config.data.max_tokens, min(config.data.max_tokens, TOKENS)
    ranks = config.nproc_per_node * config.cluster.pools.nodes
    small = ShrunkLayout.of(config.engine, ranks, longest, short, most)
    changes = engine_changes(small, config.engine, config.cluster) + steps_changes(config.engine, STEPS)
    sizes = _sizes(config, short)
    if recipe.synthetic and not config.data.data:
        sizes["data.demonstrations"] = min(config.data.demonstrations, 256)
    changes += [Change(name, "size", value) for name, value in sizes.items()]
    return apply_changes(config, changes)


def shrunk_recipe(config: SftConfig, recipe: Recipe) -> Recipe:
    """Return the recipe of a shrunk configuration, whose model is small too."""
    if recipe.origin is None:
        return recipe
    shape = tiny_shape(recipe.origin.shape, config.engine.pipeline_parallel, config.engine.tensor_parallel)
    return replace(recipe, origin=replace(recipe.origin, shape=shape, dataset_rows=None))


def supplied(config: SftConfig, recipe: Recipe, run_dir: Path) -> SftConfig:
    """Return the configuration with a model, and conversations in the recipe's column, made in the run folder.

    Raises:
        ValueError: a model is named.
    """
    if config.model is not None:
        raise ValueError("--shrink makes a tiny model of the recipe's architecture: leave --model out")
    config = replace(config, run_dir=run_dir)
    if recipe.synthetic:
        return config
    run_dir.mkdir(parents=True, exist_ok=True)
    if recipe.origin is None:
        model = ensure_tiny_model(run_dir / "model", config.seed)
    else:
        model = make_model(run_dir / "model", recipe.origin.shape, config.seed)
    data = config.data
    if not data.data:

        def row(problem: Problem) -> dict[str, Any]:
            return nested(data.messages_column, demonstration(problem, "arithmetic"))

        data = replace(data, data=(str(write_rows(run_dir / "data.jsonl", row, DIGITS, config.seed)),))
    return replace(config, model=model, data=data)


def _sizes(config: SftConfig, short: int) -> dict[str, Any]:
    sizes: dict[str, Any] = {
        "data.max_tokens": short,
        "batch_size": min(config.batch_size, 8),
        "eval_every": min(config.eval_every or 2, 2),
        "save_every": min(config.save_every, 2),
        "eval_rows": None if config.eval_rows is None else min(config.eval_rows, 8),
    }
    if config.epochs is None:
        sizes["steps"] = min(config.steps, STEPS)
    return sizes
