"""The recipes by name: every file of `apps/grpo/recipes` is one."""

from apps.common.recipes import load_recipes
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe


def recipes() -> dict[str, Recipe]:
    """All recipes by name."""
    return load_recipes("apps.grpo.recipes", Recipe)


def runnable(config: GrpoConfig, recipe: Recipe | None = None) -> Recipe:
    """The registered recipe of a configuration, or the one given, as far as it can do what is asked.

    Raises:
        ValueError: there is none of that name, it can only be planned, or the configuration asks it for what it lacks.
    """
    recipe = recipe or _registered(config.recipe)
    if recipe.make_tasks is None:
        raise ValueError(f"recipe {config.recipe!r} cannot be run yet: --plan says what it lacks")
    if config.model is None and recipe.make_model is None:
        raise ValueError(f"recipe {config.recipe!r} has no model of its own: add --model DIR")
    if config.warm_start.steps and recipe.demonstrations is None:
        raise ValueError(f"recipe {config.recipe!r} has no demonstrations to start from: leave --warm-start.steps at 0")
    return recipe


def _registered(name: str) -> Recipe:
    known = recipes()
    if name not in known:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(known)}")
    return known[name]
