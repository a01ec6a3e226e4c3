"""Samples of a stream's source: read whole by everyone, checked, cut or left out, counted, compared on resumption."""

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from seqpack.adapters.collator import Sample, cut
from seqpack.adapters.foreign_sources import fresh_iterator, keeps_exact_state, resumed
from seqpack.adapters.worker_events import StreamCounts, WorkerEvents
from seqpack.planning.padding import aligned_length
from seqpack.private_api import hidden_worker

Overlong = Literal["error", "drop", "truncate"]
Empty = Literal["error", "drop"]

_COMPARED = 64
"""Each so many samples the workers compare what they read."""


@dataclass(frozen=True)
class Limits:
    """Sizes of samples that a row takes, and what becomes of the others."""

    usable: int
    align: int
    overlong: Overlong = "error"
    empty: Empty = "error"

    def __post_init__(self) -> None:
        """Check the choices."""
        for name, choices in (("overlong", get_args(Overlong)), ("empty", get_args(Empty))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")

    def size(self, sample: Sample) -> int:
        """Return the tokens that the sample takes in a row."""
        return aligned_length(len(sample["input_ids"]), self.align)

    def fitted(self, sample: Sample, number: int) -> tuple[Sample | None, str]:
        """Return the sample as it is given, None for one left out, and which of the counts it belongs to, or ""."""
        size = self.size(sample)
        if 0 < size <= self.usable:
            return sample, ""
        if not size:
            if self.empty == "drop":
                return None, "empty"
            raise ValueError(f'sample {number} of the source has no tokens: leave it out, or pass empty="drop"')
        if self.overlong == "drop":
            return None, "overlong"
        if self.overlong == "truncate":
            return cut(sample, self.usable // self.align * self.align), "truncated"
        raise ValueError(
            f"sample {number} of the source has {size} tokens (aligned), a row holds 1..{self.usable}: cut it, leave "
            'it out, raise max_tokens, or pass overlong="truncate" or "drop"'
        )


class SourceReader:
    """An iterator over (number, sample) of all that a source gives and a row takes, from a state on.

    A source that has an exact state of its own resumes from it. Any other is read again up to there, and must give
    what it gave before: a digest of all tokens read is compared, with the state's and among workers.
    """

    def __init__(self, source: Any, limits: Limits, events: WorkerEvents, state: Mapping[str, Any]) -> None:
        self.source, self.limits, self.events = source, limits, events
        self.taken: int = state.get("taken", 0)
        self.digest: int = state.get("digest", 0)
        self.counts = StreamCounts(*state.get("counts", ()))
        self.ended: bool = state.get("ended", False)
        self.samples: Iterator[Any] = iter(())
        if self.ended:
            return
        with hidden_worker():
            if "source" in state:
                self.samples = resumed(source, state["source"])
            else:
                self.samples = fresh_iterator(source)
                self._skip()

    def state(self) -> dict[str, Any]:
        """Return how far the source was read, as plain data."""
        state = {"taken": self.taken, "digest": self.digest, "counts": list(self.counts), "ended": self.ended}
        if keeps_exact_state(self.source):
            state["source"] = self.source.state_dict()
        return state

    def read(self) -> tuple[int, Sample] | None:
        """Return the next sample that a row takes and its number in the source; None at the end."""
        while not self.ended:
            with hidden_worker():
                sample = next(self.samples, None)
            if sample is None:
                self.ended = True
                self.events.check_read("at the end", zlib.crc32(b"%d" % self.taken, self.digest))
                break
            self._count(sample)
            fitted, kind = self.limits.fitted(sample, self.taken - 1)
            if kind:
                self.counts = self.counts._replace(**{kind: getattr(self.counts, kind) + 1})
            if fitted is not None:
                return self.taken - 1, fitted
        return None

    def _count(self, sample: Any) -> None:
        """Count the sample and add its tokens to the digest."""
        self.taken += 1
        if not isinstance(sample, Mapping) or sample.get("input_ids") is None:
            contents = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else type(sample).__name__
            raise ValueError(f"sample {self.taken - 1} of the source has no input_ids, only {contents}")
        try:
            ids = np.asarray(sample["input_ids"]).astype(np.int64).tobytes()
        except (TypeError, ValueError, OverflowError) as error:
            value = f"{sample['input_ids']!r:.60}"
            raise ValueError(f"input_ids of sample {self.taken - 1} of the source is {value}: {error}") from error
        self.digest = zlib.crc32(ids, zlib.crc32(b"%d" % len(ids), self.digest))
        if self.taken % _COMPARED == 0:
            self.events.check_read(f"sample {self.taken - 1}", self.digest)

    def _skip(self) -> None:
        """Read as many samples as the state says were taken; ValueError where they are not those."""
        taken, digest, self.taken, self.digest = self.taken, self.digest, 0, 0
        while self.taken < taken and (sample := next(self.samples, None)) is not None:
            self._count(sample)
        if (self.taken, self.digest) != (taken, digest):
            raise ValueError(
                f"the source does not give the {taken} samples again that were read when the state was made: fix the "
                "seed of its order (shuffle(seed=...)), set its epoch (set_epoch), or begin a new epoch"
            )
