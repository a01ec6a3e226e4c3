"""First batch: the log-probs that a sampler gave its tokens, against the trainer's, once after each start and resume.

1. A batch serves where its tokens were all sampled by the present weights, which sampler and trainer share then. The
   first one does; after a resume of a run that samples ahead there may be none, and the weight checks say the same.
2. A `ScoringTrainer` measures the mean difference while it trains; another one scores `ROWS` responses before.
3. Past the bound (`schedules.weights.sampler_bound`) the run stops.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rollout import to_batch
from rollout.chat.segment import NOT_SAMPLED
from rollout.episodes.summary import AnyEpisode
from schedules.protocols import ScoringTrainer, Trainer, TrainResult
from schedules.rows.shared import fetch_all
from schedules.weights.sampler_bound import SamplerBound, widest

ROWS = 16
"""Responses that are scored before the first step of a trainer that measures nothing."""


@dataclass(frozen=True)
class SamplerCheck:
    """What the first batch showed of its sampler."""

    step: int
    """Number of the training step, from 0."""
    mean: float
    """Mean |difference| of the log-probs of sampler and trainer over the sampled tokens."""
    bound: SamplerBound
    lengths: tuple[int, ...]
    """Different lengths of the batch's rows."""

    @property
    def holds(self) -> bool:
        """Whether the difference is within its bound; NaN never is."""
        return self.mean <= self.bound.mean

    @property
    def metrics(self) -> dict[str, float]:
        """Both numbers, as metrics of the step."""
        return {"proof/sampler_difference": self.mean, "proof/sampler_bound": self.bound.mean}

    def __str__(self) -> str:
        """Return the line for a terminal."""
        accepted = ", widened by --allow-untested" if self.bound.loose else ""
        return (
            f"sampler: log-probs {self.mean:.2g} from the trainer's on average, rows of {min(self.lengths)} to "
            f"{max(self.lengths)} tokens (bound {self.bound.mean:g}: {self.bound.reason}{accepted})"
        )


class SamplerMismatchError(RuntimeError):
    """Log-probs of the first batch that are further from the trainer's than the sampler's arithmetic explains."""

    def __init__(self, check: SamplerCheck) -> None:
        bound = check.bound
        super().__init__(
            f"step {check.step + 1}: the sampler's log-probs are {check.mean:.3g} from the trainer's on average, and "
            f"{bound.reason} explains {bound.mean:g}: the sampler has another distribution (its settings, its dtype, "
            f"its temperature, or its weights). To go on, {bound.advice}"
        )
        self.check = check


class FirstBatch:
    """The check of a run's sampler, until a batch has served."""

    def __init__(self) -> None:
        self._due = True
        self._bound: SamplerBound | None = None
        self._scored: float | None = None
        self._lengths: tuple[int, ...] = ()

    def begin(
        self,
        trainer: Trainer,
        episodes: Sequence[AnyEpisode],
        version: int,
        bounds: Callable[[], Sequence[SamplerBound]],
    ) -> bool:
        """Note whether these episodes, about to be trained on, serve; `version`: of the weights that sampler and
        trainer have. Return whether the trainer has to score some of them before (`scored_difference`)."""
        self._bound = self._scored = None
        if not self._due or not all_fresh(episodes, version):
            return False
        self._bound = widest(bounds())
        self._lengths = tuple(sorted({segment.length for episode in episodes for segment in episode.segments}))
        return not isinstance(trainer, ScoringTrainer)

    def scored(self, difference: float) -> None:
        """Note what the trainer found before its step."""
        self._scored = difference

    def end(self, step: int, result: TrainResult) -> SamplerCheck | None:
        """Return what the batch showed; None where it does not serve, or no token of it was computed.

        Raises:
            SamplerMismatchError: the difference is past the bound.
        """
        mean = result.sampler_difference if self._scored is None else self._scored
        if self._bound is None or mean is None:
            return None
        self._due = False
        check = SamplerCheck(step, mean, self._bound, self._lengths)
        if not check.holds:
            raise SamplerMismatchError(check)
        return check


def all_fresh(episodes: Sequence[AnyEpisode], version: int) -> bool:
    """Return whether the episodes have sampled tokens, all of them by these weights."""
    versions = {
        sampled_by
        for episode in episodes
        if episode.score is not None
        for segment in episode.segments
        for sampled_by, _ in segment.spans
        if sampled_by != NOT_SAMPLED
    }
    return versions == {version}


def scored_difference(trainer: Trainer, episodes: Sequence[AnyEpisode]) -> float:
    """Return the mean difference of log-probs over the first `ROWS` episodes, by the trainer's present weights;
    collective."""
    batch = to_batch(fetch_all([episode for episode in episodes if episode.score is not None][:ROWS]))
    rows = zip(trainer.log_probs(batch), batch["rollout_log_probs"].unbind(), batch["loss_mask"].unbind(), strict=True)
    return torch.cat([(own.detach() - told).abs()[mask] for own, told, mask in rows]).mean().item()
