"""A first look at what a command line of the sft app names; see `apps.common.cli.first_look`."""

from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from apps.common.cli.first_look import look_first
from apps.common.cli.refusals import Refusals
from apps.common.run.run_dir import check_run_dir
from apps.sft.config import SftConfig
from apps.sft.registry import missing_from_recipe, registered
from runlog import check_tracker


def look(config: SftConfig, runs: Path) -> AbstractContextManager[None]:
    """Look at what a configuration names: files, recipe, run directory, trackers; return what the run is to be in.

    Raises:
        SettingsError: all that is wrong, where nothing else may be.
    """
    recipe = registered(config.recipe, config.recipe_options)

    def of_app(refusals: Refusals) -> None:
        from apps.sft.data_files import data_problems  # slow to load

        refusals.lines += missing_from_recipe(config, recipe)
        for name in config.tracker:
            refusals.of(partial(check_tracker, name))
        refusals.of(partial(check_run_dir, config.run_dir, runs, False))
        missing = data_problems(config.data, rows=False)
        refusals.lines += data_problems(config.data, rows=True) if refusals.lines or missing else []

    return look_first(config, recipe.config, of_app)
