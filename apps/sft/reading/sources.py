"""The files of --data, each with its weight in the mixture or without one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Source:
    """A file of rows. `weight`: its share of the sequences that are trained on, beside those of the other files."""

    path: Path
    weight: float | None = None


def parse_sources(texts: Sequence[str]) -> tuple[Source, ...]:
    """Parse FILE or FILE:WEIGHT of each text.

    Raises:
        ValueError: a weight that is no number above 0, weights for some files alone, or a file that comes twice.
    """
    sources = tuple(_source(text) for text in texts)
    weighted = [source for source in sources if source.weight is not None]
    if weighted and len(weighted) < len(sources):
        bare = next(source for source in sources if source.weight is None)
        raise ValueError(
            f"--data: {bare.path} has no weight and {weighted[0].path} has one: give each a weight, or none"
        )
    if len(weighted) == 1:
        raise ValueError(f"--data: a weight has no effect on a single file: write {weighted[0].path}")
    twice = [source.path for i, source in enumerate(sources) if source.path in [s.path for s in sources[:i]]]
    if twice:
        raise ValueError(f"--data: {twice[0]} is named twice: give it the larger weight instead")
    return sources


def _source(text: str) -> Source:
    path, _, tail = text.rpartition(":")
    try:
        weight = float(tail)
    except ValueError:
        return Source(Path(text))
    if not path:
        return Source(Path(text))
    if not 0 < weight < math.inf:
        raise ValueError(f"--data {text}: the weight after the colon must be a number above 0, got {tail}")
    return Source(Path(path), weight)
