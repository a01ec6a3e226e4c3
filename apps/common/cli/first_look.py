"""A first look at what a command line names: what is missing is told before anything that is slow to load.

Only where the command line asks nothing else of the model or the machine: else they may refuse more, and the run's own
checks tell all of it together.
"""

from collections.abc import Callable
from typing import Any

from apps.common.cli.extensions import own_code
from apps.common.cli.flags import changed
from apps.common.cli.recipes import beside_own_model
from apps.common.cli.refusals import Refusals
from apps.common.data.missing_model import is_missing, no_directory

_OF_THE_RUN = ("engine", "cluster", "sampling", "teachers", "warm_start")
"""Groups of settings that the model or the machine may refuse."""


def look_first(config: Any, default: Any, look: Callable[[Refusals], None]) -> None:
    """Raise what is wrong with what a command line names, as far as that needs no torch.

    Args:
        config: the app's configuration.
        default: that of its recipe.
        look: adds what is wrong with files and recipe.

    Raises:
        SettingsError: all of it.
    """
    default = beside_own_model(default) if config.model else default
    if config.resume or any(path.partition(".")[0] in _OF_THE_RUN for path in changed(config, default)):
        return
    refusals = Refusals()
    refusals.of(lambda: own_code(config))
    if is_missing(config.model):
        refusals.lines.append(no_directory(config.model))
    look(refusals)
    refusals.tell()
