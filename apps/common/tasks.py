"""Tasks as a run of the apps takes them."""

from collections.abc import Mapping
from typing import Protocol

from rollout import EnvironmentFactory, TaskRow, TaskSource


class Tasks(TaskSource, Protocol):
    """The tasks of a run, sent to every rank: picklable where there is more than one."""

    @property
    def skipped(self) -> Mapping[str, int]:
        """The number of rows of the data that were left out, by reason."""
        ...

    def environment(self, row: TaskRow) -> EnvironmentFactory:
        """Return the factory of a row's environment."""
        ...
