"""Configuration of a schedule: who waits for whom between sampling and training."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

from seqpack.extensions.load_object import is_user_code, load_object
from seqpack.extensions.options import bound

Mode = Literal["sync", "one_step_off", "fully_async"]
MODES: list[str] = [*get_args(Mode)]
"""Names that `register_schedule` adds to."""
STALENESS_THRESHOLD = 0.5
"""Share of a window that a fully asynchronous run samples ahead unless told otherwise."""


def builder_of(spec: str, options: tuple[str, ...]) -> Callable[..., Any]:
    """Return what makes a user's schedule of `ScheduleParts`, with its options.

    Raises:
        ValueError: there is none, it can't be called, or does not take the options.
    """
    make = load_object(spec, "schedule")
    if not callable(make):
        raise ValueError(f"mode {spec} is a {type(make).__name__}: a class or function of ScheduleParts is needed")
    return bound("options", spec, make, options, first=1)


@dataclass(frozen=True)
class FilterGroups:
    """Refill of groups without signal: all their rewards are equal (dynamic sampling of DAPO, arXiv 2503.14476)."""

    enable: bool = False
    """Leave groups whose rewards are all equal out of training, and sample other prompts in their place."""
    metric: str = "reward"
    """What must differ in a group: reward, the name of a reward component, or any (reward, component, turns)."""
    max_num_gen_batches: int = 10
    """Rounds of prompts that a step may sample; then it takes groups as they are. (fully_async: so many times the
    prompts of a step.)"""

    easy_threshold: float = 1.0
    """Prompts whose group earned at least this mean reward when they were last asked are the easy pool."""
    easy_fraction: float = 1.0
    """Share of the easy pool that later passes over the data ask again, drawn anew for each."""
    hard_threshold: float = 0.0
    """Prompts whose group earned at most this mean reward are the hard pool."""
    hard_fraction: float = 1.0
    """Share of the hard pool that later passes ask again."""

    def __post_init__(self) -> None:
        if problems := "; ".join(self.problems()):
            raise ValueError(problems)

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each beginning with a field's name."""
        for name in ("easy", "hard"):
            if not 0 < getattr(self, f"{name}_fraction") <= 1:
                yield f"{name}_fraction must be above 0 and at most 1, got {getattr(self, f'{name}_fraction')}"
            elif getattr(self, f"{name}_fraction") == 1 and getattr(self, f"{name}_threshold") != (name == "easy"):
                yield f"{name}_threshold has no effect where --filter-groups.{name}-fraction is 1: lower that"
        if not self.hard_threshold < self.easy_threshold:
            yield f"hard_threshold {self.hard_threshold} must be below easy_threshold {self.easy_threshold}"
        if self.max_num_gen_batches < 1:
            yield f"max_num_gen_batches must be at least 1, got {self.max_num_gen_batches}"
        for name in ("metric", "max_num_gen_batches", "easy_fraction", "hard_fraction"):
            if not self.enable and getattr(self, name) != getattr(FilterGroups, name):
                yield f"{name} has no effect without --filter-groups.enable: add it, or leave this out"


@dataclass(frozen=True)
class ScheduleConfig:
    """Who waits for whom between sampling and training."""

    mode: str = "sync"
    """Sampling then training; training on the batch before; or a queue between the two. Or a schedule of your own, as
    FILE.py:NAME or package.module:NAME: what makes it of `schedules.registry.ScheduleParts`."""
    staleness_threshold: float | None = None
    """Share of a step's samples that may come from older weights (fully_async); without it 0.5. 0 samples nothing
    ahead, and training and sampling take turns."""
    parameter_sync_step: int = 1
    """Optimizer steps between two transfers of weights (fully_async)."""
    required_batches: int = 1
    """Mini-batches of prompts that an optimizer step waits for (fully_async)."""
    partial_rollout: bool | None = None
    """Interrupt generation for new weights and go on with the same tokens (fully_async, which does unless this is
    False: new weights then wait until nothing is sampled)."""
    weight_sync: Literal["whole", "shards"] = "whole"
    """What ranks do for a weight sync: gather tensors, each whole on every rank, or send their own shards to the ranks
    that have a sampler, in a group that authenticates by the run's secret (TESSERA_GROUP_SECRET)."""
    options: tuple[str, ...] = ()
    """NAME=VALUE options of a schedule of your own, by the signature of what makes it."""

    def __post_init__(self) -> None:
        if problems := "; ".join(self.problems()):
            raise ValueError(problems)

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each beginning with a field's name."""
        problems: list[str] = []
        if is_user_code(self.mode):
            problems += self._of_user_code()
        elif self.mode not in MODES:
            known = ", ".join(map(repr, MODES))
            problems.append(f"mode must be one of {known}, or FILE.py:NAME, got {self.mode!r}")
        elif self.options and self.mode in get_args(Mode):
            problems.append(f"options: mode {self.mode!r} has none, {', '.join(self.options)} has no effect")
        if self.weight_sync not in ("whole", "shards"):
            problems.append(f"weight_sync must be 'whole' or 'shards', got {self.weight_sync!r}")
        for name in ("parameter_sync_step", "required_batches"):
            if getattr(self, name) < 1:
                problems += [f"{name} must be at least 1, got {getattr(self, name)}"]
        if not 0 <= self.stale_share < 100:
            problems.append(f"staleness_threshold must lie in [0, 100), got {self.staleness_threshold}")
        yield from problems
        queue = (self.stale_share, self.parameter_sync_step, self.required_batches, self.interrupts)
        if not problems and self.mode != "fully_async" and queue != (0.0, 1, 1, False):
            yield (
                "staleness_threshold, parameter_sync_step, required_batches and partial_rollout have no effect with "
                f"mode {self.mode!r}: use mode 'fully_async'"
            )

    def _of_user_code(self) -> Iterator[str]:
        """Yield a text where the schedule's code can't be loaded, or does not take its options."""
        try:
            builder_of(self.mode, self.options)
        except ValueError as error:
            yield str(error)

    @property
    def stale_share(self) -> float:
        """`staleness_threshold` as it holds: where nothing is said, a fully asynchronous run samples ahead."""
        if self.staleness_threshold is not None:
            return self.staleness_threshold
        return STALENESS_THRESHOLD if self.mode == "fully_async" else 0.0

    @property
    def interrupts(self) -> bool:
        """`partial_rollout` as it holds: where nothing is said, a fully asynchronous run does not wait for answers."""
        return self.mode == "fully_async" if self.partial_rollout is None else self.partial_rollout

    @property
    def correction(self) -> Literal["none", "mask"]:
        """Off-policy weights where nothing is said: "mask" where a queue of answers is sampled ahead of training."""
        return "mask" if self.mode == "fully_async" and self.stale_share > 0 else "none"
