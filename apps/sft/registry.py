"""The recipes by name: every file of `apps/sft/recipes` is one."""

import os

from apps.common.cli.recipes import load_recipes
from apps.common.plan.ready import refuse_unready
from apps.common.plan.work import Work
from apps.common.run.ranks import ranks_of_node
from apps.sft.config import SftConfig
from apps.sft.recipe import Recipe


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    return load_recipes("apps.sft.recipes", Recipe)


def work_of(config: SftConfig, recipe: Recipe | None = None) -> Work:
    """Return what the plan of a configuration is made of; `recipe` as in `runnable`.

    Raises:
        ValueError: there is no recipe of that name.
    """
    recipe = recipe or _recipe(config.recipe)
    return Work(
        app="sft",
        recipe=config.recipe,
        engine=config.engine,
        cluster=config.cluster,
        processes=ranks_of_node(config.processes, config.cluster.pools.nodes),
        steps=config.steps,
        rows=config.batch_size,
        longest=config.data.max_tokens,
        needs_model=not recipe.synthetic,
        origin=recipe.origin,
    )


def runnable(config: SftConfig, recipe: Recipe | None = None) -> Recipe:
    """Return the registered recipe of a configuration, or the one given.

    Raises:
        ValueError: there is none of that name, it can only be planned, or it lacks a model or data.
    """
    recipe = recipe or _recipe(config.recipe)
    refuse_unready(work_of(config, recipe), os.environ)
    if not recipe.synthetic:
        for name, given in (("model", config.model), ("data", config.data.data)):
            if not given:
                raise ValueError(f"recipe {config.recipe!r} has no {name} of its own: add --{name}")
    return recipe


def _recipe(name: str) -> Recipe:
    known = recipes()
    if name not in known:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(known)}")
    return known[name]
