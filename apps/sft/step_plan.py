"""The course of a run: which rows each step takes, by step alone, and how many steps there are."""

import math
from dataclasses import dataclass

from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from apps.sft.reading.mixture import Mixture


@dataclass(frozen=True)
class Course:
    """`places`: how many rows are read in all; a step takes the next `batch_size` of them, the last what is left."""

    mixture: Mixture
    batch_size: int
    steps: int
    places: int

    def rows(self, step: int) -> list[int]:
        """Return the samples of step number `step`, from 0, numbered through all files.

        Raises:
            ValueError: the run has no such step.
        """
        first = step * self.batch_size
        if not 0 <= first < self.places:
            raise ValueError(f"step {step} is not one of the {self.steps} steps of this run")
        return self.mixture.at(first, min(first + self.batch_size, self.places))


def course_of(config: SftConfig, conversations: Conversations) -> Course:
    """Return the course that a configuration asks for: so many steps, or so many epochs.

    Raises:
        ValueError: a weight is too small for the files.
    """
    mixture = Mixture(conversations.sizes, conversations.weights, config.seed)
    if config.epochs is None:
        return Course(mixture, config.batch_size, config.steps, config.steps * config.batch_size)
    places = max(1, round(config.epochs * len(mixture)))
    return Course(mixture, config.batch_size, math.ceil(places / config.batch_size), places)
