"""Rows with images on several ranks: each rank reads the images of the rows that it computes, and no others."""

from collections.abc import Sequence
from typing import TypeGuard

from tensordict import TensorDict

from apps.sft.reading.samples import Sample, batch_of
from apps.sft.reading.selection import Samples
from engines import LocalBatch, TrainEngine
from engines.execution.local_batch import RowStats
from schedules.runtime.collectives import rank_and_world
from seqpack import Objective, view_batch


def is_shared(samples: Sequence[Sample]) -> TypeGuard[Samples]:
    """Return whether each rank reads its own rows: on several ranks, of a model that sees."""
    return isinstance(samples, Samples) and samples.image_processor is not None and rank_and_world()[1] > 1


def step_batch(
    engine: TrainEngine, samples: Sequence[Sample], rows: Sequence[int], objective: Objective
) -> TensorDict | LocalBatch:
    """Return the batch of a step: all `rows` of the samples, or those that this rank trains."""
    if not is_shared(samples):
        return batch_of([samples[row] for row in rows])
    own, lengths, stats = _own_rows(engine, samples, rows, objective)
    return LocalBatch(batch_of([samples[rows[row]] for row in own]), own, lengths, stats)


def read_ahead(engine: TrainEngine, samples: Sequence[Sample], rows: Sequence[int], objective: Objective) -> None:
    """Begin to read the images that `step_batch` will ask for."""
    if not isinstance(samples, Samples) or samples.image_processor is None:
        return
    if is_shared(samples):
        rows = [rows[row] for row in _own_rows(engine, samples, rows, objective)[0]]
    samples.read_ahead(rows)


def _own_rows(
    engine: TrainEngine, samples: Samples, rows: Sequence[int], objective: Objective
) -> tuple[tuple[int, ...], tuple[int, ...], RowStats]:
    """Return which of `rows` this rank trains, the first where it trains none; lengths and counts of all."""
    view = view_batch(batch_of([samples.text(row) for row in rows]))
    stats = engine.row_stats(view, objective)
    by_rank = engine.rows_by_rank(engine.plan(view.lengths, stats.zero_gradient))
    return by_rank[rank_and_world()[0]] or (0,), view.lengths, stats


def scored_batch(
    engine: TrainEngine, samples: Sequence[Sample], rows: Sequence[int]
) -> tuple[TensorDict | LocalBatch, list[bool]]:
    """Return rows to score as this rank holds them, and for each whether it counts here: one rank counts a row."""
    if not is_shared(samples):
        return batch_of([samples[row] for row in rows]), [True] * len(rows)
    lengths = view_batch(batch_of([samples.text(row) for row in rows])).lengths
    by_rank, rank = engine.rows_by_rank(engine.plan(lengths)), rank_and_world()[0]
    own = by_rank[rank] or (0,)
    first = {row: next(number for number, held in enumerate(by_rank) if row in held) for row in own}
    return LocalBatch(batch_of([samples[rows[row]] for row in own]), own, lengths), [first[row] == rank for row in own]
