"""Checks of a run by itself: some sequences of a training pass are scored again, alone, by the stock model.

1. At the first batch, then at one every `recheck_every`, each rank chooses rows of its own part (`choose_rows`), and
   the executor scores them one at a time (`PlainScores.score_plain`), with the weights that the pass computes with.
2. The training pass itself is watched: what its loss is given of these rows is kept.
3. The differences of all ranks are reported; past the bound the step ends without an update, on every rank.

No number of the run changes: nothing random is drawn, and no gradient or weight is touched.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from engines.config import EngineConfig
from engines.dtypes import compute_dtype
from engines.execution.executor import Executor, LossFunction, Scores, Scoring, TakeScores
from engines.execution.local_batch import LocalBatch
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.media.media_batch import media_keys, select_media
from engines.nonfinite import LogProbDifferenceError
from engines.parallel.planning import PlannedRows
from seqpack.adapters.rotary import by_length
from seqpack.batches.jagged import Ragged
from seqpack.batches.schema import ROUTED_EXPERTS
from seqpack.batches.view import BatchView

BOUNDS = {torch.bfloat16: 0.25}
"""Largest differences by dtype, as root mean squares over a sequence's tokens; `EXACT` of others. In bfloat16 stock
transformers rounds logits above 16 by up to 0.06 (docs/certificates.md has what was measured)."""
EXACT = 1e-3
MIN_TOKENS = 16
"""Tokens that a sequence counts as at least: the mean of fewer squares says little."""
_PER_TOKEN = ("input_ids", "position_ids", "loss_mask", ROUTED_EXPERTS)


@runtime_checkable
class PlainScores(Executor, Protocol):
    """An executor that can score by plain operations; one that cannot is not checked while it runs."""

    def score_plain(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """Score micro-batches of one row each, without gradients, by nothing that packs, fuses or compiles.

        Collective: every rank has as many. Random state, gradients and weights stay as they were.
        """
        ...


@dataclass
class Rechecks:
    """The checks of one engine: which batches are checked."""

    config: EngineConfig
    waited: int | None = None
    """Batches since the last check; None before the first."""
    loaded: bool = False
    """Whether weights were loaded since the last batch: the next is checked too, and is no metric unless its turn has
    come, so that a resumed run has the metrics of a straight one."""

    def begin(self, executor: Executor, batch: LocalBatch, parts: Sequence[PlannedRows]) -> "Recheck | None":
        """Score rows of `parts`, this rank's micro-batches, where a check is due: before the pass. Collective."""
        self.waited = None if self.waited is None else self.waited + 1
        every = self.config.recheck_every
        reported = self.waited is None or (every > 0 and self.waited >= every)
        due, self.loaded = reported or self.loaded, False
        if not due or not self.config.recheck_rows or not isinstance(executor, PlainScores):
            return None
        cut = self.config.batching == "packed" and not by_length(executor.model)
        lengths = checkable(batch, parts, self.config.recheck_tokens, cut)
        after = [row for part in parts for row in part.rows[1:]]
        rows = choose_rows(lengths, after, self.config.recheck_rows)
        plain = _plain_rows(executor, batch, {row: lengths[row] for row in rows}, self.config)
        return Recheck(self, plain, {row: batch.lengths[row] for row in rows}, {}, reported)

    def bound(self, device: torch.device) -> float:
        """Return the largest difference that is allowed."""
        if self.config.recheck_bound is not None:
            return self.config.recheck_bound
        return BOUNDS.get(compute_dtype(self.config, device), EXACT)


class Plain(NamedTuple):
    """Log-probs f32[length] of a row that was scored alone, and its tokens that are `trained`, bool[length]."""

    log_probs: Tensor
    trained: Tensor


@dataclass
class Recheck:
    """One check: rows as scored alone (`plain`, the beginning of a long one), and f32[length] by the training pass
    (`passed`); `lengths` of the whole rows."""

    rechecks: Rechecks
    plain: Mapping[int, Plain]
    lengths: Mapping[int, int]
    passed: dict[int, Tensor]
    reported: bool
    """Whether it is a metric."""

    def tracked(self, loss: LossFunction) -> LossFunction:
        """Return the loss function, which keeps what it is given of the chosen rows."""

        def watched(micro_batch: MicroBatch, scores: Scores) -> Tensor:
            edges = pairwise(micro_batch.packed.geometry.cu_seqlens)
            for row, (start, end) in zip(micro_batch.rows, edges, strict=False):
                if row in self.plain:
                    end = min(end, start + len(self.plain[row].trained))
                    self.passed[row] = scores.log_probs.detach()[start:end].clone()
            return loss(micro_batch, scores)

        return watched

    def metrics(self, executor: Executor, step: int) -> dict[str, float]:
        """Return the largest differences of all ranks. Collective. LogProbDifferenceError past the bound."""
        measured = torch.zeros(self.rechecks.config.recheck_rows, 4, dtype=torch.float32, device=executor.device)
        for place, (row, plain) in enumerate(self.plain.items()):
            passed = self.passed.get(row)  # a step that is not finite is the guard's, and only last stages have scores
            if passed is not None and bool(passed.isfinite().all()):
                measured[place] = torch.stack(
                    [*differences(passed, plain), measured.new_tensor(float(self.lengths[row]))]
                )
        every = [torch.empty_like(measured) for _ in range(dist.get_world_size(executor.groups.world))]
        dist.all_gather(every, measured, group=executor.groups.world)
        rows = [row for row in torch.cat(every).tolist() if row[2]]
        if not rows:
            return {}
        worst, bound = max(rows), self.rechecks.bound(executor.device)
        if not worst[0] <= bound:
            raise LogProbDifferenceError(_message(step, worst, bound))
        if not self.reported:
            return {}
        self.rechecks.waited = 0
        return {"proof/log_prob_difference": worst[0], "proof/log_prob_difference_max": max(row[1] for row in rows)}


def differences(passed: Tensor, plain: Plain) -> tuple[Tensor, Tensor, Tensor]:
    """Return the root mean square of the trained tokens' differences, the largest, and how many tokens there are.

    Fewer than `MIN_TOKENS` count as so many.
    """
    apart = (passed.float() - plain.log_probs.float()).abs().nan_to_num(nan=torch.inf)
    difference = torch.where(plain.trained, apart, 0.0)
    tokens = plain.trained.sum().float()
    return (difference.square().sum() / tokens.clamp(min=MIN_TOKENS)).sqrt(), difference.max(), tokens


def checkable(batch: LocalBatch, parts: Sequence[PlannedRows], most: int, cut: bool) -> dict[int, int]:
    """Return the rows of a rank's micro-batches that train some token, with the tokens that are scored alone.

    Those of a row above `most` are its first ones, where `cut` allows it: later tokens change none of them, unless
    rotary embeddings depend on a sequence's length.
    """
    view = batch.view
    rows = [row for part in parts for row in part.rows]
    sizes = torch.tensor(view.lengths, device=view.trained.device)
    first = torch.repeat_interleave(sizes.cumsum(0) - sizes, sizes)
    early = torch.arange(len(first), device=first.device) - first < most
    trained = view.row_sums(view.trained & early).tolist()
    cut = cut and not media_keys(view)
    kept = [(row, batch.lengths[row]) for row, place in zip(rows, batch.places(rows), strict=True) if trained[place]]
    return {row: min(length, most) for row, length in kept if cut or length <= most}


def choose_rows(lengths: Mapping[int, int], after: Collection[int], count: int) -> tuple[int, ...]:
    """Return at most `count` rows: the longest, the shortest, and others evenly between, by `lengths`.

    Rows that lie `after` others in their micro-batch come first: a lost boundary shows in these.
    """
    order = sorted(lengths, key=lambda row: (lengths[row], row in after, row))
    if len(order) <= count:
        return tuple(order)
    chosen = [order.pop()]
    if count > 1:
        order.remove(shortest := next((row for row in order if row in after), order[0]))
        chosen.append(shortest)
    return (*chosen, *(order[len(order) * number // (count - 1)] for number in range(1, count - 1)))


def _plain_rows(
    executor: PlainScores, batch: LocalBatch, lengths: Mapping[int, int], config: EngineConfig
) -> dict[int, Plain]:
    """Return these rows, each scored alone. Collective."""
    places = batch.places([*lengths]) or [0]
    view = batch.view.select(places)
    columns = dict(view.columns)
    for key in _PER_TOKEN:
        if isinstance(column := columns.get(key), Ragged):
            columns[key] = column._replace(lengths=[*lengths.values()] or column.lengths)
    sizes = tuple(lengths.values()) or view.lengths
    alone = LocalBatch(BatchView(sizes, columns, view.device), tuple(range(len(sizes))), sizes)
    index = executor.groups.plan_index
    parts = [PlannedRows((number,) if number < len(lengths) else (), (index,)) for number in range(config.recheck_rows)]
    keys = select_media(alone.view, ("input_ids", "position_ids", "loss_mask"))
    keys += [ROUTED_EXPERTS] * config.routing_replay
    rows: list[int] = [*lengths]
    by_row: dict[int, Plain] = {}

    def take(micro_batch: MicroBatch, scores: Scores) -> None:
        if micro_batch.rows:
            by_row[rows[micro_batch.rows[0]]] = Plain(scores.log_probs.detach().clone(), micro_batch.wanted)

    micro_batches = MicroBatches(alone, parts, lambda _: None, executor.device, keys)
    executor.score_plain(micro_batches, take, Scoring(config.temperature))
    return by_row


def _message(step: int, worst: Sequence[float], bound: float) -> str:
    difference, largest, _, length = worst
    return (
        f"step {step}: a sequence of {length:.0f} tokens has other log-probs in the training pass than the stock model "
        f"gives it alone: {difference:.3g} apart (root mean square, largest {largest:.3g}), where recheck_bound is "
        f"{bound:.3g}; no update was made. Run with compile='off' (--trainer.compile off) or batching='padded' "
        "(--trainer.batching padded), and file an issue; recheck_bound allows more"
    )
