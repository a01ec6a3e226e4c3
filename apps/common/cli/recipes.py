"""Recipes are found by folder: each file of an app's `recipes` folder is one, and adding one is adding that file."""

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

from seqpack.extensions.load_object import absolute_spec, load_object
from seqpack.extensions.options import bound

R = TypeVar("R")
C = TypeVar("C")


def beside_own_model(config: C) -> C:
    """Return a recipe's settings for a model of the user's: it computes on the accelerator where there is one.

    A recipe that makes a tiny model says `device="cpu"`, where equal runs give equal bits: that is for its own model.
    """
    settings: Any = config
    if settings.engine.device != "cpu":
        return config
    changed: C = replace(settings, engine=replace(settings.engine, device="auto"))
    return changed


def own_recipe(spec: str, options: Sequence[str], kind: type[R]) -> R:
    """Return the recipe that FILE.py:NAME or package.module:NAME is, or that the function there makes with options.

    Its settings' name is the spec, with the whole path of the file.

    Raises:
        ValueError: there is none, or it takes other options.
    """
    made: Any = load_object(spec, "recipe")
    if not isinstance(made, kind) and callable(made):
        made = bound("--recipe-options", spec, made, options)()
    elif options:
        raise ValueError(f"--recipe-options {options[0]} has no effect: {spec} is a recipe, and no function")
    if not isinstance(made, kind):
        raise ValueError(f"--recipe {spec} is a {type(made).__name__}: a {kind.__module__}.{kind.__name__} is needed")
    recipe: Any = made
    config = replace(recipe.config, recipe=absolute_spec(spec), recipe_options=tuple(options))
    own: R = replace(recipe, config=config)
    return own


def load_recipes(package: str, kind: type[R]) -> dict[str, R]:
    """Return the recipes of a package by name, the file's name with dashes: `a_b.py` is "a-b".

    A recipe's file holds a constant RECIPE of type `kind`, whose `config.recipe` repeats the name.

    Raises:
        ValueError: a file holds no such constant, or another name.
    """
    recipes: dict[str, R] = {}
    for file in pkgutil.iter_modules(importlib.import_module(package).__path__):
        if file.name.endswith("_test"):
            continue
        name = file.name.replace("_", "-")
        recipe: Any = getattr(importlib.import_module(f"{package}.{file.name}"), "RECIPE", None)
        if not isinstance(recipe, kind):
            raise ValueError(f"{package}.{file.name} needs a constant RECIPE, a {kind.__name__}")
        if recipe.config.recipe != name:  # type: ignore[attr-defined]
            raise ValueError(f"{package}.{file.name}: RECIPE.config.recipe must be {name!r}")
        recipes[name] = recipe
    return recipes
