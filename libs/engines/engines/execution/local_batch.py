"""The rows of a global batch that one rank holds, and what ranks tell one another about the rows that they hold."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engines.media.media_batch import media_keys, with_positions
from engines.media.vision_settings import VisionSettings
from engines.parallel.groups import ParallelGroups
from seqpack.batches.batch import view_batch
from seqpack.batches.view import BatchView, Totals

_ABSENT = -(2**62)


@dataclass(frozen=True)
class RowStats:
    """Counts of all rows that a step needs, and the rows without a gradient."""

    totals: Totals
    zero_gradient: frozenset[int]


@dataclass(frozen=True)
class LocalBatch:
    """Some rows of a global batch, for `train_batch` and `forward`: every rank passes the rows that it holds.

    Row i of `batch` is row rows[i] of the global batch, whose lengths are `lengths`, the same on every rank. A rank
    must hold at least `engine.plan(lengths).rows_of(rank)` (rank: `ParallelGroups.plan_index`, the rank's number where
    there is data parallelism alone); more is allowed. ValueError for rows that do not exist, come twice, or have
    another length than `lengths` says.

    `stats`, the same on every rank: what all of them know of all rows (`TrainEngine.row_stats`). Then rows without a
    gradient are nobody's: a rank holds those of `engine.plan(lengths, stats.zero_gradient)`, trains what a whole batch
    would, and `forward` scores those rows alone, so that nothing of a row travels between ranks.
    """

    batch: TensorDict | BatchView
    rows: tuple[int, ...]
    lengths: tuple[int, ...]
    stats: RowStats | None = None

    def __post_init__(self) -> None:
        view = self.view
        object.__setattr__(self, "rows", tuple(self.rows))
        object.__setattr__(self, "lengths", tuple(self.lengths))
        if len(self.rows) != len(view):
            raise ValueError(f"rows names {len(self.rows)} rows of the global batch, this rank's batch has {len(view)}")
        if len(set(self.rows)) != len(self.rows):
            raise ValueError("rows names a row of the global batch twice")
        for row, length in zip(self.rows, view.lengths, strict=True):
            if not 0 <= row < len(self.lengths):
                raise ValueError(f"row {row} is not in the global batch of {len(self.lengths)} rows")
            if length != self.lengths[row]:
                raise ValueError(f"row {row} has {length} tokens here, lengths says {self.lengths[row]}")

    @cached_property
    def view(self) -> BatchView:
        """The view of the rows that are held, checked once."""
        return view_batch(self.batch)

    @cached_property
    def _places(self) -> dict[int, int]:
        return {row: place for place, row in enumerate(self.rows)}

    def places(self, rows: Sequence[int]) -> list[int]:
        """Return the positions in the view of these rows of the global batch; KeyError for a row that is not held."""
        return [self._places[row] for row in rows]

    def with_positions(self, settings: VisionSettings) -> "LocalBatch":
        """Return the rows with their media checked and positions on several axes; see `engines.media.media_batch`."""
        return replace(self, batch=with_positions(self.view, settings))

    def require(self, keys: Sequence[str], sees: bool = False) -> None:
        """Raise ValueError naming the keys that are missing, or images where the model `sees` none."""
        present = self.view.keys()
        missing = [key for key in keys if key not in present]
        if missing:
            raise ValueError(f"the batch lacks {', '.join(missing)}; it has {', '.join(sorted(present))}")
        media = media_keys(self.view)
        if media and not sees:
            raise ValueError(
                f"the engine trains text alone, the batch has {', '.join(media)}: leave them out, or set "
                "vision='frozen' or 'trained' for a vision-language model"
            )


def input_ids_of(batch: TensorDict | BatchView | LocalBatch) -> Tensor | None:
    """Return the jagged `input_ids` of a batch as it was given; None of a view, which holds no jagged tensors."""
    given = batch.batch if isinstance(batch, LocalBatch) else batch
    return given.get("input_ids") if isinstance(given, TensorDict) else None


def row_stats(view: BatchView, zero: Tensor | None) -> RowStats:
    """Compute the counts of a whole batch. `zero` bool[B]: rows without a gradient, None where they are not wanted."""
    rows = [] if zero is None else zero.nonzero().flatten().tolist()
    return RowStats(view.totals, frozenset(rows))


def gather_row_stats(
    batch: LocalBatch, zero: Tensor | None, needed: Sequence[int], groups: ParallelGroups, device: torch.device
) -> RowStats:
    """Gather the counts of all rows from the ranks that hold them. Collective over the plan's ranks.

    ValueError on every one of them where a rank lacks a row that it is to compute (`needed`), or two ranks hold rows
    of one number that differ in trained tokens, group, episode or gradient.
    """
    # Columns by row: trained tokens, group, episode, zero gradient. Maxima of (x, -x) are the largest and smallest that
    # is held; a row held nowhere keeps _ABSENT. The last entry is 1 + the plan index of a rank that lacks a row.
    columns = torch.full((4, len(batch.lengths)), _ABSENT, dtype=torch.int64)
    view, rows = batch.view, torch.tensor(batch.rows)
    columns[0, rows] = view.row_sums(view.trained).cpu()
    for column, key in enumerate(("group", "episode"), 1):
        columns[column, rows] = view.columns[key].cpu() if key in view else 0
    columns[3, rows] = 0 if zero is None else zero.to("cpu", torch.int64)
    lacks = _lacking(batch, needed, groups)
    low = torch.where(columns == _ABSENT, columns, -columns)
    flat = torch.cat([columns.flatten(), low.flatten(), torch.tensor([lacks])]).to(device)
    if groups.layout.plan_size > 1:
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=groups.plan)
    flat = flat.cpu()
    _refuse_lacking(int(flat[-1]))
    high, low = flat[:-1].view(2, 4, -1)
    odd = ((high != -low) & (high != _ABSENT)).any(0).nonzero().flatten().tolist()
    if odd:
        raise ValueError(f"ranks hold different rows under the number {odd[0]}: number the rows alike on every rank")
    trained, group, episode, zeros = high
    used = trained > 0
    group_count, episode_count = (len(set(names[used].tolist())) for names in (group, episode))
    totals = Totals(
        int(trained.clamp(min=0).sum()),
        int(used.sum()),
        group_count if "group" in view else 0,
        episode_count if "episode" in view else None,
    )
    return RowStats(totals, frozenset((zeros == 1).nonzero().flatten().tolist()))


def check_held(batch: LocalBatch, needed: Sequence[int], groups: ParallelGroups, device: torch.device) -> None:
    """Raise ValueError on every rank of the plan where one of them lacks a row that it is to compute. Collective."""
    lacks = torch.tensor([_lacking(batch, needed, groups)], device=device)
    if groups.layout.plan_size > 1:
        dist.all_reduce(lacks, op=dist.ReduceOp.MAX, group=groups.plan)
    _refuse_lacking(int(lacks))


def _lacking(batch: LocalBatch, needed: Sequence[int], groups: ParallelGroups) -> int:
    """Return 1 + this rank's plan index where it lacks a row, else 0."""
    return 0 if set(needed) <= set(batch.rows) else groups.plan_index + 1


def _refuse_lacking(number: int) -> None:
    if number:
        raise ValueError(
            f"rank {number - 1} of the plan lacks a row that it is to compute: give each rank at least "
            "engine.plan(lengths).rows_of(rank)"
        )
