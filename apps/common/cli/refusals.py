"""All that refuses a run, collected: one check after the other, and one error for what they raised together."""

import sys
from collections.abc import Callable, Iterable
from typing import TypeVar

from apps.common.cli.flags import SettingsError

T = TypeVar("T")


def write_errors(messages: Iterable[str]) -> None:
    """Write a line an error to standard error."""
    sys.stderr.write("".join(f"error: {' '.join(message.split())}\n" for message in messages))


class Refusals:
    """The texts of what refuses a run so far."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def of(self, check: Callable[[], T]) -> T | None:
        """Return the result of the check; None where it raised a ValueError, whose texts are kept."""
        try:
            return check()
        except SettingsError as error:
            self.lines += error.lines
        except ValueError as error:
            self.lines.append(str(error))
        return None

    def tell(self) -> None:
        """Raise SettingsError with all texts, each once, where there are any."""
        if self.lines:
            raise SettingsError(dict.fromkeys(self.lines))
