"""A first look at what a command line names: what is missing is told before anything that is slow to load.

Where the command line asks nothing else of the model or the machine, that ends the program. Else they may refuse more:
the run's own checks go on, and tell the rest.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from apps.common.cli.extensions import own_code
from apps.common.cli.flags import SettingsError, changed
from apps.common.cli.recipes import beside_own_model
from apps.common.cli.refusals import Refusals, write_errors
from apps.common.data.missing_model import is_missing, no_directory

_OF_THE_RUN = ("engine", "cluster", "sampling", "teachers", "warm_start")
"""Groups of settings that the model or the machine may refuse."""


def look_first(config: Any, default: Any, look: Callable[[Refusals], None]) -> AbstractContextManager[None]:
    """Look at what a command line names, as far as that needs no torch; return what the run is to be in.

    Args:
        config: the app's configuration.
        default: that of its recipe.
        look: adds what is wrong with files and recipe.

    Raises:
        SettingsError: all that is wrong, where nothing else may be.
    """
    if config.resume:
        return nullcontext()
    refusals = Refusals()
    refusals.of(lambda: own_code(config))
    if is_missing(config.model):
        refusals.lines.append(no_directory(config.model))
    look(refusals)
    default = beside_own_model(default) if config.model else default
    if not any(path.partition(".")[0] in _OF_THE_RUN for path in changed(config, default)):
        refusals.tell()
    return errors_first(refusals.lines) if refusals.lines else nullcontext()


@contextmanager
def errors_first(lines: list[str]) -> Iterator[None]:
    """Write errors at once; raise what a run within refuses besides.

    Raises:
        SettingsError: all of that.
        SystemExit: with status 2 where nothing else was refused.
    """
    write_errors(lines)
    sys.stderr.write("the rest of the settings is checked ...\n")
    sys.stderr.flush()
    try:
        yield
    except ValueError as error:
        rest = error.lines if isinstance(error, SettingsError) else (str(error),)
        if more := [line for line in rest if line not in lines]:
            raise SettingsError(more) from None
        raise SystemExit(2) from None
