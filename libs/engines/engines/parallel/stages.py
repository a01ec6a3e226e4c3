"""The number of layers of each pipeline stage, and which they are."""

from dataclasses import dataclass
from math import gcd

Split = tuple[tuple[int, ...], ...]
"""Layers of each stage, chunk by chunk."""


@dataclass(frozen=True)
class StageSizes:
    """The settings of the stages: chunks of a rank (interleaved schedule), and layers of the first and last stage."""

    chunks: int = 1
    first: int | None = None
    last: int | None = None

    def split(self, layers: int, stages: int) -> Split:
        """See `split_layers`."""
        return split_layers(layers, stages, self.chunks, self.first, self.last)


def split_layers(layers: int, stages: int, chunks: int = 1, first: int | None = None, last: int | None = None) -> Split:
    """Return the number of layers of each stage, chunk by chunk (one chunk unless the schedule is interleaved).

    `first` and `last` fix those stages; the others share the rest evenly. The sum is always `layers`.

    Raises:
        ValueError: the layers do not divide; the text says what would.
    """
    problems = split_problems(layers, stages, chunks, first, last)
    if problems:
        raise ValueError("; ".join(problems))
    fixed = _given(stages, first, last)
    each = (layers - sum(fixed.values())) // max(1, stages - len(fixed))
    return tuple((fixed.get(stage, each) // chunks,) * chunks for stage in range(stages))


def split_problems(
    layers: int, stages: int, chunks: int = 1, first: int | None = None, last: int | None = None
) -> list[str]:
    """Return every reason against a split by `split_layers`, each with sizes that would do."""
    fixed = _given(stages, first, last)
    free, rest = stages - len(fixed), layers - sum(fixed.values())
    each, over = divmod(rest, free) if free else (0, rest)
    problems = []
    if rest < free or (over and not free):
        problems.append(
            f"first and last stage hold {sum(fixed.values())} of {layers} layers, which leaves {rest} for "
            f"{free} stages: change first_stage_layers and last_stage_layers, or lower pipeline_parallel"
        )
    elif over:
        problems.append(
            f"{rest} layers do not divide over {free} stages: set first_stage_layers and last_stage_layers "
            f"(such as {_uneven(layers, stages)}), or choose pipeline_parallel from {_divisors(layers)}"
        )
    counts = [*fixed.values(), *([each] if free and not problems else [])]
    odd = [count for count in counts if count % chunks]
    if odd:
        problems.append(
            f"a stage of {odd[0]} layers does not divide into {chunks} chunks: lower virtual_pipeline_parallel to a "
            f"divisor of {gcd(*counts)}"
        )
    elif layers % chunks:  # whatever the stages' sizes become
        problems.append(
            f"{layers} layers do not divide into {chunks} chunks a stage: lower virtual_pipeline_parallel to a divisor "
            f"of {layers}"
        )
    return problems


def _given(stages: int, first: int | None, last: int | None) -> dict[int, int]:
    """Return the layers of the stages whose size is set, by stage."""
    fixed = {0: first, stages - 1: last} if stages > 1 else {}
    return {stage: count for stage, count in fixed.items() if count is not None}


def stage_layers(split: Split, stage: int, chunk: int = 0) -> range:
    """Return the layers of one chunk: chunk 0 of all stages comes first, then chunk 1, ... (Megatron's order)."""
    before = sum(sum(counts[:chunk]) for counts in split) + sum(counts[chunk] for counts in split[:stage])
    return range(before, before + split[stage][chunk])


def _uneven(layers: int, stages: int) -> str:
    """Return sizes of the first and last stage, which have the embedding and the head, below those of the others."""
    if stages < 3:
        return f"{layers // 2} and {layers - layers // 2}"
    middle = -(-layers // stages)
    while middle > 1 and layers - middle * (stages - 2) < 2:
        middle -= 1
    ends = layers - middle * (stages - 2)
    return f"{ends // 2} and {ends - ends // 2}"


def _divisors(layers: int) -> list[int]:
    return [size for size in range(1, layers + 1) if layers % size == 0]
