"""The plan of a run's steps: how many there are, and the rows of each as a function of the step alone."""

import math
from dataclasses import dataclass

from apps.sft.config import SftConfig
from apps.sft.data import Conversations
from apps.sft.reading.mixture import Mixture


@dataclass(frozen=True)
class StepPlan:
    """The steps of a run: each takes the next `batch_size` of all `places` rows, the last one the rest."""

    mixture: Mixture
    batch_size: int
    steps: int
    places: int
    eval_every: int
    """Steps between evaluations."""

    def rows(self, step: int) -> list[int]:
        """Return the samples of step number `step`, from 0, numbered through all files.

        Raises:
            ValueError: the run has no such step.
        """
        first = step * self.batch_size
        if not 0 <= first < self.places:
            raise ValueError(f"step {step} is not one of the {self.steps} steps of this run")
        return self.mixture.at(first, min(first + self.batch_size, self.places))


def plan_steps(config: SftConfig, conversations: Conversations) -> StepPlan:
    """Return the plan of a configuration's steps or epochs.

    Raises:
        ValueError: a weight is too small for the files.
    """
    mixture = Mixture(conversations.sizes, conversations.weights, config.seed)
    every = config.eval_every or eval_interval(
        int(conversations.held_out[: config.eval_rows].lengths.sum()),
        float(conversations.train.lengths.mean()) * config.batch_size,
    )
    if config.epochs is None:
        return StepPlan(mixture, config.batch_size, config.steps, config.steps * config.batch_size, every)
    places = max(1, round(config.epochs * len(mixture)))
    return StepPlan(mixture, config.batch_size, math.ceil(places / config.batch_size), places, every)


def warnings_of(config: SftConfig, plan: StepPlan, conversations: Conversations) -> list[str]:
    """Return what keeps a short run from learning: few rows for a step's size, a rate that never gets to its value."""
    rows, held_out = sum(conversations.sizes), len(conversations.held_out)
    told = []
    if config.batch_size > rows:
        told.append(
            f"{rows} rows to train on ({held_out} held out), and a step takes {config.batch_size}: a smaller "
            "--batch-size gives more steps"
        )
    if config.engine.warmup_steps >= plan.steps > 0:
        told.append(
            f"the learning rate rises over {config.engine.warmup_steps} steps, and there are {plan.steps}: a smaller "
            "--trainer.warmup-steps, or more steps"
        )
    return told


def eval_interval(evaluated: int, tokens_a_step: float) -> int:
    """Return the steps between evaluations: 25, or so many that `evaluated` tokens are a tenth of those trained on."""
    return max(25, math.ceil(10 * evaluated / tokens_a_step))
