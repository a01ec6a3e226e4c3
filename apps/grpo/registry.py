"""The recipes by name: every file of `apps/grpo/recipes` is one."""

import os

from apps.common.cli.environment import refuse_unset
from apps.common.cli.recipes import beside_own_model, load_recipes
from apps.common.cli.refusals import Refusals
from apps.common.cli.words import recipe_words
from apps.common.data.model_files import sizes_of
from apps.common.program import INSTALLED
from apps.common.run.ranks import ranks_of_node
from apps.grpo.config import GrpoConfig
from apps.grpo.recipe import Recipe
from engines.testing.npu.path import is_fake
from runplan.model.origin import model_type
from runplan.report.readiness import unready
from runplan.run_spec import RunSpec

NEEDS = (("model", "DIR"), ("data.data", "FILE"))


def recipes() -> dict[str, Recipe]:
    """Return all recipes by name."""
    return load_recipes("apps.grpo.recipes", Recipe)


def spec_of(config: GrpoConfig, recipe: Recipe | None = None) -> RunSpec:
    """Return the run spec of a configuration, for its plan; `recipe` as in `runnable`.

    Raises:
        ValueError: there is no recipe of that name.
    """
    recipe = recipe or registered(config.recipe)
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
        reference_policy=config.objective.kl_coef > 0,
        held_out=config.data.eval_prompts,
        eval_share=0.0 if config.data.eval_data else config.data.eval_share,
        own=own,
        unknown=unknown,
        needs_model=recipe.make_model is None,
        origin=recipe.origin,
        model_type=model_type(config.model),
        fake_device=config.engine.device == "npu" and is_fake(),
        installed=INSTALLED,
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
    recipe, refusals = recipe or registered(config.recipe), Refusals()
    if reasons := unready(spec_of(config, recipe)):
        refusals.lines += [*reasons, f"recipe {config.recipe!r} can't be run with these settings; --plan says all"]
    refusals.of(lambda: refuse_unset(config.cluster.env, os.environ))
    if recipe.make_tasks is None:
        refusals.lines.append(f"recipe {config.recipe!r} cannot be run yet: --plan says what it lacks")
    if config.model is None and recipe.make_model is None:
        refusals.lines.append(f"recipe {config.recipe!r} has no model of its own: add --model DIR")
    if config.warm_start.steps and recipe.demonstrations is None:
        refusals.lines.append(
            f"recipe {config.recipe!r} has no demonstrations to start from: leave --warm-start.steps at 0"
        )
    refusals.tell()
    return recipe


def registered(name: str) -> Recipe:
    """Return the recipe of a name.

    Raises:
        ValueError: there is none.
    """
    known = recipes()
    if name not in known:
        raise ValueError(f"no recipe {name!r}; there are {', '.join(known)}")
    return known[name]
