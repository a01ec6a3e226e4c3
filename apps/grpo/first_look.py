"""A first look at what a command line of the grpo app names; see `apps.common.cli.first_look`."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from apps.common.cli.first_look import look_first
from apps.common.cli.refusals import Refusals
from apps.common.run.run_dir import check_run_dir
from apps.grpo.config import GrpoConfig
from apps.grpo.registry import missing_from_recipe, registered
from runlog import check_tracker


def look(config: GrpoConfig, runs: Path | None) -> AbstractContextManager[None]:
    """Look at what a configuration names: files, recipe, run directory, trackers; return what the run is to be in.

    `runs`: where new runs are; None for a command that writes none.

    Raises:
        SettingsError: all that is wrong, where nothing else may be.
    """
    recipe = registered(config.recipe, config.recipe_options)

    def of_app(refusals: Refusals) -> None:
        from apps.grpo.tasks.prompt_files import data_problems, missing_files  # slow to load

        refusals.lines += missing_from_recipe(config, recipe)
        for name in config.tracker:
            refusals.of(partial(check_tracker, name))
        if runs is not None:
            refusals.of(partial(check_run_dir, config.run_dir, runs, False))
        missing = missing_files(config)
        refusals.lines += data_problems(config) if refusals.lines or missing else []

    return look_first(config, recipe.config, of_app)
