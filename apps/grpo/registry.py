"""The recipes by name: every file of `apps/grpo/recipes` is one.

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
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from engines.fake_npu.path import is_fake
from runplan.model.origin import model_type
from runplan.run_spec import RunSpec
from seqpack.extensions.load_object import is_user_code

NEEDS = (("model", "DIR"), ("data.data", "FILE"))


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    return load_recipes("apps.grpo.recipes", Recipe)


def spec_of(config: GrpoConfig, recipe: Recipe | None = None) -> RunSpec:
    """Return the run spec of a configuration, for its plan; `recipe` as in `runnable`.

    Raises:
        ValueError: there is no recipe of that name.
    """
    from apps.common.data.planned_model import balances, fields_of, sizes_of  # slow to load
    from apps.common.run.ranks import ranks_of_node  # slow to load

    recipe = recipe or registered(config.recipe, config.recipe_options)
    own, unknown = sizes_of(config.model, config.engine)
    return RunSpec(
        app="grpo",
        recipe=config.recipe,
        engine=config.engine,
        cluster=config.cluster,
        processes=ranks_of_node(config.nproc_per_node, config.cluster.pools.nodes),
        steps=config.steps,
        rows=config.prompts_per_step,
        group=config.group_size,
        mini_batches=config.mini_batches,
        epochs=config.epochs,
        longest=config.max_episode_tokens,
        reference_policy=config.needs_reference or config.teachers.frozen,
        device_teachers=config.teachers.on_devices,
        held_out=config.data.eval_prompts,
        eval_share=0.0 if config.data.eval_data else config.data.eval_share,
        own=own,
        unknown=unknown,
        config_fields=fields_of(config.model),
        balancing_loss=balances(config.model),
        needs_model=recipe.make_model is None,
        origin=recipe.origin,
        model_type=model_type(config.model),
        fake_device=config.engine.device == "npu" and is_fake(),
        installed=INSTALLED,
        own_code=lines_of(own_code(config)),
        words=recipe_words(
            config,
            beside_own_model(recipe.config) if config.model else recipe.config,
            () if recipe.make_model else NEEDS,
        ),
    )


def runnable(config: GrpoConfig, recipe: Recipe | None = None) -> Recipe:
    """Return the registered recipe of a configuration, or `recipe`, after a check that it can be run.

    Raises:
        SettingsError: there is none of that name, it can only be planned, or the configuration asks it for what it
            lacks; all of it.
    """
    from runplan.report.readiness import unready  # slow to load

    recipe, refusals = recipe or registered(config.recipe, config.recipe_options), Refusals()
    if reasons := unready(spec_of(config, recipe)):
        refusals.lines += [*reasons, f"recipe {config.recipe!r} can't be run with these settings; --plan says all"]
    refusals.of(lambda: refuse_unset(config.cluster.env, os.environ))
    refusals.lines += missing_from_recipe(config, recipe)
    refusals.tell()
    return recipe


def missing_from_recipe(config: GrpoConfig, recipe: Recipe) -> list[str]:
    """Return what the recipe has not, and the configuration does not bring."""
    lines = []
    if recipe.make_tasks is None:
        lines.append(f"recipe {config.recipe!r} cannot be run yet: --plan says what it lacks")
    if config.model is None and recipe.make_model is None:
        lines.append(f"recipe {config.recipe!r} has no model of its own: add --model DIR")
    for name, steps in (("", config.warm_start.steps), ("teacher-", config.teachers.teacher_warm_start.steps)):
        if steps and recipe.demonstrations is None:
            lines.append(
                f"recipe {config.recipe!r} has no demonstrations to start from: leave --{name}warm-start.steps at 0"
            )
    return lines


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
