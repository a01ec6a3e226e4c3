"""A batch checked once: lengths, counts and the parts of its jagged tensors, so that nobody derives them twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from seqpack.batches.dicts import build, leaf, take
from seqpack.batches.jagged import Ragged, flattened, jagged_from_values, ragged
from seqpack.planning.checks import check_indices

if TYPE_CHECKING:
    from tensordict import TensorDict


@dataclass(frozen=True)
class Totals:
    """Counts of a whole global batch, the same on every rank and for every micro-batch.

    `tokens`: trained tokens (`loss_mask` True, a sequence's first token never counted). `sequences` and `groups`:
    those with at least one trained token; `groups` is 0 where the batch has no key `group`. `episodes`: how many
    episodes the sequences are of, None where the batch has no key `episode`.
    """

    tokens: int
    sequences: int
    groups: int = 0
    episodes: int | None = None

    @property
    def answers(self) -> int:
        """The number that a mean over answers divides by: episodes, or sequences where episodes are not known."""
        return self.sequences if self.episodes is None else self.episodes

    @staticmethod
    def of(batch: "TensorDict | BatchView") -> "Totals":
        """Count a batch (jagged `loss_mask`, optional `group` and `episode`). ValueError when it has no `loss_mask`.

        Only these keys are read and the schema is not checked; a view counts itself once (`BatchView.totals`).
        """
        if isinstance(batch, BatchView):
            return batch.totals
        if "loss_mask" not in batch.keys():  # noqa: SIM118 (a TensorDict iterates over its samples)
            raise ValueError("the batch has no key 'loss_mask', so there is nothing to count")
        group, episode = (leaf(batch, key) if key in batch.keys() else None for key in ("group", "episode"))  # noqa: SIM118
        return _count(ragged(batch["loss_mask"]), group, episode)


@dataclass(frozen=True)
class BatchView:
    """A batch that was checked, taken apart; made by `view_batch`. The batch must not change while it is in use.

    `lengths`: tokens of each sample. `columns`: by key the parts of a jagged tensor (sample i of a per-token key is
    `parts.values.narrow(parts.dim, parts.starts[i], lengths[i])`), a dense tensor, a list of per-sample Python
    values, a nested TensorDict, or `Shared` metadata. `device`: where `input_ids` lies.
    """

    lengths: tuple[int, ...]
    columns: dict[str, Any]
    device: torch.device

    def __len__(self) -> int:
        return len(self.lengths)

    def __contains__(self, key: str) -> bool:
        return key in self.columns

    def keys(self) -> tuple[str, ...]:
        """Return the names of the columns."""
        return tuple(self.columns)

    @cached_property
    def totals(self) -> Totals:
        """The counts of this batch; of a selection, those of the selection. ValueError without a `loss_mask`."""
        return _count(self.parts("loss_mask"), self.columns.get("group"), self.columns.get("episode"))

    @cached_property
    def trained(self) -> Tensor:
        """The trained tokens of all samples in order, bool[tokens]; a sequence's first token is never trained."""
        return _trained(self.parts("loss_mask"))

    def parts(self, key: str) -> Ragged:
        """Return the parts of a jagged column. ValueError when the key is missing or its column is not jagged."""
        if key not in self.columns:
            raise ValueError(f"the batch has no key {key!r}; it has {', '.join(map(str, self.columns))}")
        value = self.columns[key]
        if not isinstance(value, Ragged):
            raise ValueError(f"{key} is not jagged, but {type(value).__name__}")
        return value

    def flat(self, key: str) -> Tensor:
        """Return the samples of a jagged column one after another along its ragged dimension, without holes.

        The tokens of all per-token columns then agree: entry t of each belongs to the same token.
        """
        return flattened(self.parts(key))

    def row_sums(self, flat: Tensor) -> Tensor:
        """Sum a tensor of one entry a token, shape (tokens,), over each sample, (B,): in int64, or float32 at least."""
        values = flat.to(torch.promote_types(flat.dtype, torch.float32) if flat.is_floating_point() else torch.int64)
        rows = torch.repeat_interleave(torch.tensor(self.lengths, dtype=torch.int64, device=flat.device))
        return values.new_zeros(len(self.lengths)).index_add(0, rows, values)

    def select(self, indices: Sequence[int] | Tensor) -> "BatchView":
        """Return the view of the samples at `indices`, in that order, repeats allowed; no token is copied."""
        if isinstance(indices, Tensor) and indices.dtype == torch.bool:
            raise ValueError("indices must be integers; turn a mask into indices with mask.nonzero().squeeze(1)")
        rows = check_indices(indices, len(self.lengths))
        columns = {key: _rows_of(value, rows) for key, value in self.columns.items()}
        return BatchView(tuple(self.lengths[i] for i in rows), columns, self.device)

    def to_batch(self) -> "TensorDict":
        """Return the TensorDict of this batch; columns that have no holes are not copied."""
        columns = {
            key: jagged_from_values(flattened(value), value.lengths, value.dim) if isinstance(value, Ragged) else value
            for key, value in self.columns.items()
        }
        return build(columns, len(self.lengths), self.device)


def _rows_of(column: Any, rows: list[int]) -> Any:
    if isinstance(column, Ragged):
        return column._replace(starts=[column.starts[i] for i in rows], lengths=[column.lengths[i] for i in rows])
    return take(column, rows)


def _trained(mask: Ragged) -> Tensor:
    flat = flattened(mask).to(torch.bool)
    ends = torch.tensor([0, *mask.lengths], device=flat.device).cumsum(0)
    firsts = ends[:-1][ends.diff() > 0]
    return flat.index_fill(0, firsts, False)


def _count(mask: Ragged, group: Any, episode: Any) -> Totals:
    rows = torch.repeat_interleave(torch.tensor(mask.lengths, dtype=torch.int64))
    trained = torch.bincount(rows[_trained(mask).cpu()], minlength=len(mask.lengths)).tolist()
    groups, episodes = (
        None if names is None else len({name for name, count in zip(names.tolist(), trained, strict=True) if count})
        for names in (group, episode)
    )
    return Totals(sum(trained), sum(count > 0 for count in trained), groups or 0, episodes)
