"""Scores of micro-batches in the rows of the batch that they came from."""

from itertools import accumulate

import torch
from tensordict import TensorDict
from torch import Tensor

from engines.execution.executor import Scores, Scoring
from engines.execution.local_batch import LocalBatch
from engines.execution.micro_batches import MicroBatch
from engines.parallel.groups import ParallelGroups
from seqpack.batches.dicts import share_offsets
from seqpack.batches.jagged import jagged_from_values
from seqpack.batches.schema import SEVERAL


class ScoredBatch:
    """The scores of a batch, f32[columns, tokens of the whole batch], filled by one micro-batch after another."""

    def __init__(self, batch: LocalBatch, scoring: Scoring, groups: ParallelGroups, device: torch.device) -> None:
        self.batch = batch
        self.groups = groups
        self.own = batch.stats is not None
        """Whether the rows that are held are all that is kept."""
        places = dict(zip(batch.rows, accumulate(batch.view.lengths, initial=0), strict=False))
        starts = [places.get(row, 0) for row in range(len(batch.lengths))]
        self.starts = torch.tensor(starts if self.own else [0, *accumulate(batch.lengths)]).to(device)
        tokens = sum(batch.view.lengths if self.own else batch.lengths)
        k = scoring.top_k if scoring.tokens is None else batch.view.parts(scoring.tokens).values.shape[0]
        self.widths = {"log_probs": 1, **({"entropy": 1} if scoring.entropy else {})}
        self.widths |= dict(zip(SEVERAL, (k, k, 1), strict=True)) if k else {}
        # Tokens are numbers too: float32 has all integers to 2^24.
        self.flat = torch.zeros((sum(self.widths.values()), tokens), dtype=torch.float32, device=device)

    def take(self, micro_batch: MicroBatch, scores: Scores) -> None:
        """Take the scores of a micro-batch."""
        # Ranks that share a micro-batch all have its scores, and they are added over ranks: the first gives them.
        if micro_batch.dummy or not (self.own or micro_batch.ranks[0] == self.groups.plan_index):
            return
        columns = [scores.log_probs, scores.entropy, *(scores.several or ())]
        rows = [x.float().view(len(x), -1).t() for x in columns if x is not None]
        self.flat[:, tokens_of(micro_batch, self.starts)] = torch.cat(rows)

    def rows(self, like: Tensor | None) -> TensorDict:
        """Return the rows that are held, which compose with `like`. Collective."""
        batch = self.batch
        flat = self.groups.to_stages(self.flat) if self.own else self.groups.sum(self.flat)
        lengths, parts = batch.view.lengths, dict(zip(self.widths, flat.split([*self.widths.values()]), strict=True))
        if SEVERAL[0] in parts:
            firsts = self.starts[list(batch.rows)] if self.own else self.starts[:-1]
            parts[SEVERAL[0]][:, firsts] = -1  # nothing is scored at first tokens
        if not self.own and batch.rows != tuple(range(len(batch.lengths))):
            rows, sizes = torch.tensor(batch.rows, device=flat.device), torch.tensor(lengths, device=flat.device)
            ends = sizes.cumsum(0)
            index = torch.repeat_interleave(self.starts[rows] - ends + sizes, sizes)
            flat = flat[:, index + torch.arange(sum(lengths), device=flat.device)]
        flat = flat.to(batch.view.device)
        parts = dict(zip(self.widths, flat.split([*self.widths.values()]), strict=True))
        columns = {
            key: jagged_from_values(x.long() if key == SEVERAL[0] else x if key == SEVERAL[1] else x[0], lengths)
            for key, x in parts.items()
        }
        return TensorDict(share_offsets(columns, like), batch_size=[len(lengths)])


def tokens_of(micro_batch: MicroBatch, starts: Tensor) -> Tensor:
    """Return i64[T], the places of a micro-batch's tokens among those of the whole batch."""
    packed = micro_batch.packed
    cu_seqlens = packed.cu_seqlens.to(torch.int64)
    rows = torch.tensor(micro_batch.rows, device=starts.device)
    shift = starts[rows] - cu_seqlens[:-1]
    return torch.repeat_interleave(shift, cu_seqlens.diff()) + torch.arange(packed.num_tokens, device=starts.device)
