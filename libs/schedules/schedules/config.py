"""Configuration of a schedule: who waits for whom between sampling and training."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

Mode = Literal["sync", "one_step_off", "fully_async"]
MODES: list[str] = [*get_args(Mode)]
"""Names that `register_schedule` adds to."""
STALENESS_THRESHOLD = 0.5
"""Share of a window that a fully asynchronous run samples ahead unless told otherwise."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Who waits for whom between sampling and training."""

    mode: str = "sync"
    """Sampling then training; training on the batch before; or a queue between the two."""
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

    def __post_init__(self) -> None:
        if problems := "; ".join(self.problems()):
            raise ValueError(problems)

    def problems(self) -> Iterator[str]:
        """Yield texts of all that is wrong, each beginning with a field's name."""
        problems = []
        if self.mode not in MODES:
            problems.append(f"mode must be one of {', '.join(map(repr, MODES))}, got {self.mode!r}")
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
