"""Certificate of a run's sampler, by its first batch, in the run directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from apps.common.cli.certificates import write_proofs
from apps.common.run.reporter import Reporter
from engines import TrainEngine
from engines.families.registry import digest
from engines.loading import read_config
from engines.prove.certificate import Certificate, place, versions
from schedules.runtime.collectives import rank_and_world
from schedules.sampling.first_batch import SamplerCheck, SamplerMismatchError
from schedules.schedule import TrainStepResult
from schedules.weights.sampler_bound import LOOSE, UNTESTED
from seqpack.extensions.load_object import is_user_code


def unchecked(mode: str, result: TrainStepResult) -> str | None:
    """Return the line on a user's schedule whose first step, `result`, did not hold the sampler to the trainer."""
    if not is_user_code(mode) or result.sampler is not None or not result.metrics.get("train/computed_sequences", 1):
        return None
    return (
        f"schedule {mode} did not check the sampler by its first batch: call begin_first_batch and session.first.end "
        "(docs/add-a-schedule.md)"
    )


@dataclass(frozen=True)
class SamplerRecord:
    """Writer of the certificate, on the first rank."""

    log: Reporter
    engine: TrainEngine
    sampler: str
    """Name of the sampler."""
    model: Path
    """The directory that the run began with."""

    @contextmanager
    def of_mismatch(self) -> Iterator[None]:
        """Write the certificate of a sampler that stops the run, too."""
        try:
            yield
        except SamplerMismatchError as error:
            self.keep(error.check, str(error))
            raise

    def keep(self, check: SamplerCheck, *problems: str) -> None:
        """Tell what the first batch showed, and write it."""
        self.log.note(str(check))
        if rank_and_world()[0]:
            return
        bound = check.bound
        past = bound.loose and check.mean > bound.mean / LOOSE
        write_proofs(self.log.run_dir, [self._certificate(check, problems)], {UNTESTED: str(check)} if past else {})

    def _certificate(self, check: SamplerCheck, problems: tuple[str, ...]) -> Certificate:
        bound, config = check.bound, read_config(self.model).get_text_config()
        return Certificate(
            model_type=config.model_type,
            config=digest(config),
            width="true",
            lengths=check.lengths,
            log_probs=check.mean,
            gradients=0.0,
            padded=None,
            sensitivity={},
            not_exercised=(),
            problems=problems,
            seconds=0.0,
            versions=versions(),
            subject="sampler",
            options={
                "sampler": self.sampler,
                "step": check.step + 1,
                "bound": bound.mean,
                "dtype": bound.dtype,
                "settings": list(bound.settings),
                "widened": bound.loose,
            },
            place=place(self.engine.state_summary()["device"]),
        )
