"""The recipes by name: every file of `apps/sft/recipes` is one.

A command line reads them: what needs torch is imported where it is used.
"""

import os
from collections.abc import Sequence

from apps.common.cli.environment import refuse_unset
from apps.common.cli.extensions import lines_of, own_code
from apps.common.cli.recipes import beside_own_model, load_recipes, own_recipe
from apps.common.cli.refusals import Refusals
from apps.common.cli.words import recipe_words
from apps.common.program import INSTALLED
from apps.sft.config import SftConfig
from apps.sft.recipe import Recipe
from engines.fake_npu.path import is_fake
from runplan.run_spec import RunSpec
from seqpack.extensions.load_object import is_user_code

NEEDS = (("model", "DIR"), ("data.data", "FILE"))


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    return load_recipes("apps.sft.recipes", Recipe)


def spec_of(config: SftConfig, recipe: Recipe | None = None) -> RunSpec:
    """Return the run spec of a configuration, for its plan; `recipe` as in `runnable`.

    Raises:
        ValueError: there is no recipe of that name.
    """
    from apps.common.data.planned_model import balances, fields_of, sizes_of  # slow to load
    from apps.common.run.ranks import ranks_of_node  # slow to load

    recipe = recipe or registered(config.recipe, config.recipe_options)
    share, most = config.data.held_out
    own, unknown = sizes_of(config.model, config.engine)
    return RunSpec(
        app="sft",
        recipe=config.recipe,
        engine=config.engine,
        cluster=config.cluster,
        processes=ranks_of_node(config.nproc_per_node, config.cluster.pools.nodes),
        steps=config.steps,
        rows=config.batch_size,
        longest=config.data.max_tokens,
        eval_share=0.0 if config.data.eval_data else share,
        held_out=most or 0,
        own=own,
        unknown=unknown,
        config_fields=fields_of(config.model),
        balancing_loss=balances(config.model),
        needs_model=not recipe.synthetic,
        origin=recipe.origin,
        fake_device=config.engine.device == "npu" and is_fake(),
        installed=INSTALLED,
        own_code=lines_of(own_code(config)),
        words=recipe_words(
            config,
            beside_own_model(recipe.config) if config.model else recipe.config,
            () if recipe.synthetic else NEEDS,
        ),
    )


def runnable(config: SftConfig, recipe: Recipe | None = None) -> Recipe:
    """Return the registered recipe of a configuration, or `recipe`, after a check that it can be run.

    Raises:
        SettingsError: there is none of that name, it can only be planned, or it lacks a model or data; all of it.
    """
    from runplan.report.readiness import unready  # slow to load

    recipe, refusals = recipe or registered(config.recipe, config.recipe_options), Refusals()
    if reasons := unready(spec_of(config, recipe)):
        refusals.lines += [*reasons, f"recipe {config.recipe!r} can't be run with these settings; --plan says all"]
    refusals.of(lambda: refuse_unset(config.cluster.env, os.environ))
    refusals.lines += missing_from_recipe(config, recipe)
    refusals.tell()
    return recipe


def missing_from_recipe(config: SftConfig, recipe: Recipe) -> list[str]:
    """Return what the recipe has not, and the configuration does not bring."""
    named = () if recipe.synthetic else (("model", config.model), ("data", config.data.data))
    return [f"recipe {config.recipe!r} has no {name} of its own: add --{name}" for name, value in named if not value]


def registered(name: str, options: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a name, or of FILE.py:NAME with options.

    Raises:
        ValueError: there is none, or it takes other options.
    """
    if is_user_code(name):
        return own_recipe(name, options, Recipe)
    if options:
        raise ValueError(f"--recipe-options {options[0]} has no effect: recipe {name!r} has no options")
    known = recipes()
    if name not in known:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(known)}")
    return known[name]
