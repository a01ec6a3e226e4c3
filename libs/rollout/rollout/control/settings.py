"""What bounds an asynchronous run."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StalenessSettings:
    """Bounds of sampling that runs ahead of training, in groups (a prompt with all its answers).

    `groups_per_step`: groups of a mini-batch. A step trains `required_batches` of them, and after every
    `parameter_sync_step` steps the samplers get the new weights: a window. `staleness_threshold`: how much of a
    window's groups may have been begun with the weights of an earlier one; above 1, of windows further back.
    `partial_rollout`: running answers are interrupted for new weights and go on from their tokens; without it weights
    wait until nothing runs. `total_steps`: the run's. `max_running`: groups that are sampled at once; None: as many as
    the bound allows.

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
        """Groups that a step trains."""
        return self.groups_per_step * self.required_batches

    @property
    def window(self) -> int:
        """Groups that are trained between two transfers of weights."""
        return self.batch * self.parameter_sync_step

    @property
    def ahead(self) -> int:
        """Groups that may be begun beyond those of the present window."""
        return math.floor(self.staleness_threshold * self.window + 1e-9)

    @property
    def bound(self) -> int:
        """The largest staleness that any group is trained with: transfers of weights since it was begun."""
        return -(-self.ahead // self.window)

    @property
    def total(self) -> int:
        """Groups that the whole run trains."""
        return self.total_steps * self.batch

    def version_of(self, step: int) -> int:
        """Return the number of the weights that the samplers have once `step` steps are done and handed over."""
        return -(-step // self.parameter_sync_step)
