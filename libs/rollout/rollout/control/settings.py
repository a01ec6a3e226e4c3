"""Bounds of an asynchronous run."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessSettings:
    """Bounds of sampling that runs ahead of training, in groups (a prompt with all its completions).

    `groups_per_step`: groups of a mini-batch. A step trains `required_batches` of them, and after every
    `parameter_sync_step` steps the samplers get the new weights; the steps between are a window. `staleness_threshold`:
    the share of a window's groups that may begin with the weights of an earlier window; above 1, of windows further
    back. `partial_rollout`: running completions are interrupted for new weights and continue from their tokens; without
    it a weight sync waits until nothing runs. `total_steps`: steps of the run. `max_running`: most groups that are
    sampled at once; None: as many as the bound allows.

    The settings are those of verl's fully asynchronous policy (its capacity formula is AReaL's, arXiv 2505.24298); the
    bound holds for every group here, not on average.
    """

    groups_per_step: int
    total_steps: int
    staleness_threshold: float = 0.0
    parameter_sync_step: int = 1
    required_batches: int = 1
    partial_rollout: bool = False
    max_running: int | None = None

    def __post_init__(self) -> None:
        for name in ("groups_per_step", "total_steps", "parameter_sync_step", "required_batches", "max_running"):
            value = getattr(self, name)
            if value is None and name == "max_running":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        if not 0 <= self.staleness_threshold < 100:
            raise ValueError(f"staleness_threshold must lie in [0, 100), got {self.staleness_threshold}")

    @property
    def batch(self) -> int:
        """Number of groups that a step trains."""
        return self.groups_per_step * self.required_batches

    @property
    def window(self) -> int:
        """Number of groups that are trained between two weight syncs."""
        return self.batch * self.parameter_sync_step

    @property
    def ahead(self) -> int:
        """Number of groups that may begin beyond those of the present window."""
        return math.floor(self.staleness_threshold * self.window + 1e-9)

    @property
    def bound(self) -> int:
        """The largest staleness of a trained group: weight syncs since it began."""
        return -(-self.ahead // self.window)

    @property
    def total(self) -> int:
        """Number of groups that the whole run trains."""
        return self.total_steps * self.batch

    def version_of(self, step: int) -> int:
        """Return the samplers' version of the weights once `step` steps are done and synced."""
        return -(-step // self.parameter_sync_step)
