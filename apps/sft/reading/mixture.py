"""The sample at each place of a run, a pure function of sizes, weights and seed, so that a resumed run continues
exactly.

1. An epoch has as many places as all files have samples. Without weights it reads every sample once, in an order of
   its own.
2. With weights each file has its share of the places, the same number in every epoch, in an order of its own.
3. A file's places read its samples one after another in a shuffled order, and go on from epoch to epoch: none comes
   again before all others of its file have come as often.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from rollout.seeds import derive_seed


@dataclass(frozen=True)
class Mixture:
    """The mixture of files. `sizes`: the samples of each; `weights`: their shares, None for one pool of all."""

    sizes: tuple[int, ...]
    weights: tuple[float, ...] | None
    seed: int

    def __post_init__(self) -> None:
        if self.weights is not None and not all(self.places):
            least = self.places.index(0)
            raise ValueError(
                f"the weight {self.weights[least]:g} of file {least + 1} of --data is less than one sample in an epoch "
                f"of {len(self)}: leave the file out, or raise its weight"
            )

    def __len__(self) -> int:
        return sum(self.sizes)

    @property
    def places(self) -> tuple[int, ...]:
        """The number of an epoch's places of each file, by largest remainders."""
        if self.weights is None:
            return self.sizes
        exact = [len(self) * weight / sum(self.weights) for weight in self.weights]
        counts = [int(share) for share in exact]
        by_rest = sorted(range(len(exact)), key=lambda i: counts[i] - exact[i])
        for i in by_rest[: len(self) - sum(counts)]:
            counts[i] += 1
        return tuple(counts)

    def at(self, first: int, end: int) -> list[int]:
        """Return the samples at places first..end-1 of the run, numbered through all files."""
        return [_order(self, place // len(self))[place % len(self)] for place in range(first, end)]


@lru_cache(maxsize=4)
def _order(mixture: Mixture, epoch: int) -> Sequence[int]:
    """Return the samples of an epoch in order."""
    if mixture.weights is None:
        return _shuffled(len(mixture), derive_seed(mixture.seed, "epoch", epoch))
    places = mixture.places
    labels = [file for file, count in enumerate(places) for _ in range(count)]
    random.Random(derive_seed(mixture.seed, "files", epoch)).shuffle(labels)
    starts = list(accumulate(mixture.sizes, initial=0))
    streams = [iter(_draws(mixture, file, epoch * count, (epoch + 1) * count)) for file, count in enumerate(places)]
    return [starts[file] + next(streams[file]) for file in labels]


def _draws(mixture: Mixture, file: int, first: int, end: int) -> list[int]:
    """Return draws first..end-1 of a file's samples, numbered within it."""
    size = mixture.sizes[file]
    samples: list[int] = []
    for turn in range(first // size, -(-end // size)):
        order = _shuffled(size, derive_seed(mixture.seed, f"file {file}", turn))
        samples += order[max(first - turn * size, 0) : end - turn * size]
    return samples


def _shuffled(count: int, seed: int) -> list[int]:
    return random.Random(seed).sample(range(count), count)
