"""One optimizer step on any backend: what is planned, counted, checked and reported, over an `Executor` that computes.

A step of `Engine.train_batch`, in order:

1. The batch is checked once into a view; its keys are those that the objective needs.
2. Rows that add nothing to loss and gradient are left out, the rest is planned: a pure function of lengths.
3. All ranks compare a hash of plan and totals, so that a disagreement is an error and not a hang.
4. The executor gets all micro-batches and the loss, and runs them under its own schedule.
5. Metrics are summed over the ranks that split the batch; a loss or gradient that is not finite makes no update.

Invariants, each with a test: the loss is that of the whole batch whatever plan, number of ranks and executor are; every
rank runs as many micro-batches as the others; a step that fails leaves weights, optimizer and step number alone.
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, SupportsFloat, Unpack

import torch
from tensordict import TensorDict
from torch import Tensor

from engines.capability import Supported, Unsupported, supports
from engines.config import Adam, EngineConfig, parse_context_parallel
from engines.dtypes import compute_dtype
from engines.engine_state import EngineState
from engines.execution.executor import Executor, Scoring
from engines.execution.local_batch import LocalBatch, RowStats, check_held, gather_row_stats, input_ids_of, row_stats
from engines.execution.loss import StepLoss, check_objective, scoring_of
from engines.execution.lr_schedule import learning_rate
from engines.execution.metrics import agreed_number, check_agreement
from engines.execution.micro_batches import MicroBatches
from engines.execution.prefetch import PrefetchedMicroBatches, PrefetchedStep
from engines.experts.routed_experts_check import check_routed_experts
from engines.experts.routers import routed_sizes
from engines.media.media_batch import select_media
from engines.media.vision_settings import VisionSettings
from engines.nonfinite import FailedStepError
from engines.parallel.planning import Planner, StepPlan
from engines.protocol import Batch, TrainEngine
from engines.scoring.router_counts import ScoredCounts
from engines.scoring.scored_batch import ScoredBatch
from engines.scoring.several_check import check_several
from engines.weights.model_weights import ModelWeights
from engines.weights.sizes import PIECE_BYTES as PIECE_BYTES
from seqpack.batches.batch import view_batch
from seqpack.batches.objective import Objective
from seqpack.batches.schema import ROUTED_EXPERTS
from seqpack.batches.view import BatchView


@dataclass(frozen=True)
class _Work:
    """A step that the ranks agreed on."""

    batch: LocalBatch
    plan: StepPlan
    stats: RowStats
    computed: tuple[int, ...]


class Engine(EngineState):
    """See `engines.protocol.TrainEngine`; made by `build_engine`."""

    def __init__(self, config: EngineConfig, executor: Executor, planner: Planner, weights: ModelWeights) -> None:
        super().__init__(config, executor, weights)
        self.planner = planner
        self.vision = None if config.vision == "off" else VisionSettings.of(executor.model.config)
        self._routed = routed_sizes(executor.model) if config.routing_replay else (0, 0, 0)
        self.reference: TrainEngine | None = None
        self._ahead = PrefetchedStep()
        self._loss = 0.0

    # ------------------------------------------------------------------ training

    def train_batch(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Make one optimizer step: plan, pack, accumulate over micro-batches, clip, update.

        Every rank gives the same whole batch, or the rows that it holds as a `LocalBatch`. Besides the objective's
        metrics: loss, grad_norm, lr, step, tokens, sequences, trained_tokens, computed_tokens and computed_sequences
        (what `skip_zero_gradient_rows` left), micro_batches (of a rank), fill, plan_hash, skipped (1 where no update
        was made) and skipped_steps (so far); of a model with experts what `engines.experts.load_metrics` names; where
        sequences were checked (`EngineConfig.recheck_every`) proof/log_prob_difference and its maximum.
        `NonFiniteError` where loss or gradient are not finite, see `EngineConfig.on_nonfinite`;
        `LogProbDifferenceError` where the check fails; ValueError for a batch or objective that cannot be trained on.
        """
        self._check_stepped("train_batch")
        finish = self._accumulate(batch, objective)
        return self._update(finish, {}, batch)

    def forward_backward(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Add the gradient of a batch to those since the last `optimizer_step`; return the metrics of `train_batch` but
        those of the update.

        The loss is divided by the totals of this batch. An error drops what was added since the last update.
        """
        finish = self._accumulate(batch, objective)
        self._ahead.run()
        return finish()

    def optimizer_step(self, **adam: Unpack[Adam]) -> dict[str, float]:
        """Clip the gradient that `forward_backward` has summed, and update; see `engines.config.Adam` for settings of
        this update alone. Return the loss (summed too), grad_norm, lr, step, skipped and skipped_steps.

        ValueError without a gradient, and for settings that `EngineConfig` refuses.
        """
        if self._accumulated is None:
            raise ValueError("there is no gradient to step by: call forward_backward first")
        if unknown := adam.keys() - Adam.__annotations__.keys():
            raise ValueError(f"optimizer_step has no {min(unknown)}; it takes {', '.join(Adam.__annotations__)}")
        return self._update(dict, adam)

    def _update(
        self, finish: Callable[[], dict[str, float]], adam: Adam, batch: Batch | None = None
    ) -> dict[str, float]:
        """Step by the gradient, and return the metrics that `finish` reads with those of the update. Collective."""
        rate = adam.get("lr", learning_rate(self.config, self.step))
        share, self._accumulated, self.scored_counts = self._accumulated, None, None
        assert share is not None, "there is a gradient"
        update = self.executor.optimizer_step(rate, share, replace(self.config, **adam) if adam else self.config)
        self._ahead.run()
        metrics = finish()
        try:
            norm = self._take_update(self._loss, update)
        except FailedStepError as error:
            error.batch = batch
            raise
        return metrics | {
            "loss": self._loss,
            "grad_norm": norm,
            "lr": rate,
            "step": float(self.step),
            "skipped": float(not math.isfinite(norm)),
            "skipped_steps": float(self.guard.skipped),
        }

    def _accumulate(self, batch: Batch, objective: Objective) -> Callable[[], dict[str, float]]:
        """Compute and add up the gradient of a batch; return the function that reads its metrics. Collective."""
        if not self.executor.trainable:
            raise ValueError("this engine was built with trainable=False: it can only score")
        self._check_onloaded()
        check_objective(objective)
        earlier, self._accumulated = self._accumulated, None  # what fails from here on leaves part of a gradient
        work, micro_batches = self._ready(batch, objective)
        plan, totals = work.plan, work.stats.totals
        if not totals.tokens:
            raise ValueError("no token of the batch is trained: loss_mask is False everywhere")
        factor = self.config.mtp_loss_scaling_factor
        loss = StepLoss(objective, totals, factor)
        scoring = replace(scoring_of(objective, self.config.temperature), mtp=factor is not None)
        recheck = self.rechecks.begin(self.executor, work.batch, plan.ranks[self.groups.plan_index])
        tracked = loss if recheck is None else recheck.tracked(loss)
        known = None if self.scored_counts is None else self.scored_counts.counts_of(work.batch.view)
        counted: dict[str, Any] = {} if known is None or isinstance(batch, LocalBatch) else {"counts": known}
        self.executor.train(micro_batches, tracked, scoring, add=earlier is not None, **counted)
        try:
            recheck_metrics = {} if recheck is None else recheck.metrics(self.executor, self.step + 1)
        except FailedStepError as error:
            error.batch = batch
            raise
        share = loss.share(self.device)
        self._accumulated = share if earlier is None else earlier + share
        reduced = loss.start(self.groups.plan)  # before the update, which the host does not wait for then
        sizes = {
            "tokens": float(sum(work.batch.lengths)),
            "sequences": float(len(work.batch.lengths)),
            "trained_tokens": float(totals.tokens),
            "computed_tokens": float(sum(work.batch.lengths[row] for row in work.computed)),
            "computed_sequences": float(len(work.computed)),
            "micro_batches": float(plan.num_micro_batches),
            "fill": plan.fill,
            "plan_hash": float(plan.hash),
        }

        def finish() -> dict[str, float]:
            metrics = self.groups.from_last_stage(reduced()) | recheck_metrics | sizes
            self._loss = metrics["loss"] + (0.0 if earlier is None else self._loss)
            return metrics

        return finish

    def prefetch(self, batch: Batch, objective: Objective) -> None:
        """Name the batch after the next: it is planned, packed and copied while the device works on the next.

        It must be the very object, unchanged, with the same objective, as a whole batch. Not collective.
        """
        if isinstance(batch, LocalBatch):
            raise ValueError("prefetch takes whole batches; ranks that hold parts have to agree on them first")
        if parse_context_parallel(self.config.context_parallel) != 1:
            raise ValueError("prefetch is for ranks that share no sequences: set context_parallel='off'")
        self._ahead.ask(batch, objective, lambda: self._prepare(batch, objective))

    def _prepare(self, batch: Batch, objective: Objective) -> tuple["_Work", MicroBatches]:
        work = self._work(view_batch(batch), objective)
        micro_batches = self.executor.ahead(self._micro_batches(work.batch, work.plan))
        if isinstance(micro_batches, PrefetchedMicroBatches):
            micro_batches.begin()
        return work, micro_batches

    def _ready(self, batch: Batch, objective: Objective) -> tuple["_Work", MicroBatches]:
        """Return a step that the ranks agree on and its micro-batches, prepared before or now. Collective."""
        prepared: tuple[_Work, MicroBatches] | None = self._ahead.take(batch, objective)
        if prepared is None:
            work = self._agree_on(batch, objective)
            return work, self._micro_batches(work.batch, work.plan)
        self._check_agreement("whole", prepared[0].plan.hash, prepared[0].stats.totals)
        return prepared

    def plan(self, lengths: Sequence[int], without: Collection[int] = ()) -> StepPlan:
        """Plan a step from the lengths of all rows: pure, the same on every rank. ValueError for a row over the cap.

        `without`: rows that no rank computes.
        """
        if not without:
            return self.planner.plan(lengths)
        computed = tuple(row for row in range(len(lengths)) if row not in without)
        planned = computed or (0,)  # nothing to compute: a plan for one row, without it
        plan = self.planner.plan([lengths[row] for row in planned]).with_rows(planned, tuple(lengths))
        return plan.without(() if computed else planned)

    def rows_by_rank(self, plan: StepPlan) -> tuple[tuple[int, ...], ...]:
        """Return the rows that each rank of the run must hold for a plan; pure."""
        layout = self.groups.layout
        return tuple(plan.rows_of(layout.plan_index(rank)) for rank in range(layout.world_size))

    def row_stats(self, batch: TensorDict | BatchView, objective: Objective) -> RowStats:
        """Return the counts of a batch, and its rows without a gradient, of which a step computes nothing. Pure.

        Of all rows `loss_mask` is read, `group` and `episode` where they are there, and `advantages` where an
        objective's gradient is 0 without one.
        """
        view = view_batch(batch)
        return row_stats(view, self._zero_gradient_rows(view, objective))

    def _agree_on(self, batch: Batch, objective: Objective) -> _Work:
        """Check the batch, leave out rows without a gradient, and plan. Collective."""
        if isinstance(batch, LocalBatch) and batch.stats is None:
            return self._agree_on_parts(batch, objective)
        work = self._work(batch if isinstance(batch, LocalBatch) else view_batch(batch), objective)
        self._check_agreement("known" if isinstance(batch, LocalBatch) else "whole", work.plan.hash, work.stats.totals)
        if isinstance(batch, LocalBatch):
            check_held(work.batch, self._needed(work.plan), self.groups, self.device)
        self.planner.prepare(work.plan)
        return work

    def _work(self, batch: BatchView | LocalBatch, objective: Objective) -> _Work:
        """Check a batch of which all rows are known, leave out rows without a gradient and plan."""
        local = batch if isinstance(batch, LocalBatch) else _whole(batch)
        local = self._checked(local, ("loss_mask", *objective.required_keys))
        check_several(local.view, scoring_of(objective, 1.0), self.executor.model)
        stats = local.stats or self.row_stats(local.view, objective)
        computed = tuple(row for row in range(len(local.lengths)) if row not in stats.zero_gradient)
        return _Work(local, self.plan(local.lengths, stats.zero_gradient), stats, computed)

    def _agree_on_parts(self, batch: LocalBatch, objective: Objective) -> _Work:
        """Check and plan where ranks hold parts: the plan is of all lengths, then loses rows without a gradient."""
        batch = self._checked(batch, ("loss_mask", *objective.required_keys))
        check_several(batch.view, scoring_of(objective, 1.0), self.executor.model)
        plan = self.planner.plan(batch.lengths)
        self._check_agreement("parts", plan.hash, batch.lengths)
        zero = self._zero_gradient_rows(batch.view, objective)
        stats = gather_row_stats(batch, zero, self._needed(plan), self.groups, self.device)
        self.planner.prepare(plan)
        computed = tuple(row for row in range(len(batch.lengths)) if row not in stats.zero_gradient)
        return _Work(batch, plan.without(stats.zero_gradient), stats, computed)

    def _checked(self, batch: LocalBatch, keys: Sequence[str]) -> LocalBatch:
        """Return the batch with these keys checked, media only where the model sees them, and their positions."""
        batch.require(keys, sees=self.vision is not None)
        if self.config.routing_replay:
            check_routed_experts(batch.view, *self._routed)
        return batch if self.vision is None else batch.with_positions(self.vision)

    def _needed(self, plan: StepPlan) -> list[int]:
        return [row for part in plan.ranks[self.groups.plan_index] for row in part.rows]

    def _zero_gradient_rows(self, view: BatchView, objective: Objective) -> Tensor | None:
        if self.executor.adds_loss or not self.config.skip_zero_gradient_rows:
            return None
        return objective.zero_gradient_rows(view)

    def _check_agreement(self, *metadata: object) -> None:
        check_agreement(agreed_number(metadata), "the plan of this step", self.device, self.groups.world)

    def _micro_batches(self, batch: LocalBatch, plan: StepPlan, keys: Sequence[str] | None = None) -> MicroBatches:
        parts = plan.ranks[self.groups.plan_index]
        return MicroBatches(batch, parts, self.planner.group, self.device, keys)

    def _take_update(self, loss: float, update: SupportsFloat) -> float:
        """Return the gradient norm; the executor made no update where it or the loss is not finite."""
        norm = float(update) if math.isfinite(loss) else math.nan
        self.guard.check(self.step + 1, loss, norm)
        if math.isfinite(norm):
            self.step += 1
        return norm

    # ------------------------------------------------------------------ scoring

    @torch.no_grad()
    def forward(
        self,
        batch: Batch,
        entropy: bool = False,
        temperature: float | None = None,
        tokens: str | None = None,
        top_k: int = 0,
    ) -> TensorDict:
        """Score every token but the first of each row: jagged float32 `log_probs` (and `entropy`), 0 at first tokens.

        All rows of a whole batch on every rank; of a `LocalBatch` the rows that the rank holds. On the batch's device.
        `temperature` overrides the configuration's. Dropout adds no noise. `tokens`, a key of the batch, or `top_k`
        asks for several tokens at each: the result then has the keys of `seqpack.batches.schema.SEVERAL`.
        """
        self._check_onloaded()
        local = batch if isinstance(batch, LocalBatch) else _whole(view_batch(batch))
        scoring = Scoring(self.config.temperature if temperature is None else temperature, entropy, tokens, top_k)
        local = self._checked(local, ())
        check_several(local.view, scoring, self.executor.model)
        plan = self.plan(local.lengths, local.stats.zero_gradient if local.stats else ())
        self._check_agreement("scores", plan.hash, isinstance(batch, LocalBatch), local.stats is None)
        if isinstance(batch, LocalBatch):
            check_held(batch, self._needed(plan), self.groups, self.device)
        self.planner.prepare(plan)
        keys = select_media(local.view, ("input_ids", "position_ids")) + [ROUTED_EXPERTS] * self.config.routing_replay
        scored = ScoredBatch(local, scoring, self.groups, self.device)
        keys += [] if tokens is None else [tokens]
        counts = self.executor.score(self._micro_batches(local, plan, keys), scored.take, scoring)
        if counts is not None and not isinstance(batch, LocalBatch):
            self.scored_counts = ScoredCounts.of(local.view, counts)
        return scored.rows(input_ids_of(batch))

    def supports(self, feature: str) -> Supported | Unsupported:
        """See `engines.capability`."""
        return supports(self.config, feature)

    def state_summary(self) -> dict[str, Any]:
        """Return plain facts for logs."""
        compiled = self.executor.compiled
        return {
            "backend": self.config.backend,
            "batching": self.config.batching,
            "compiled": f"no: {compiled.reason}" if isinstance(compiled, Unsupported) else "yes",
            "device": str(self.device),
            "dtype": str(compute_dtype(self.config, self.device)).removeprefix("torch."),
            "layout": str(self.groups.layout),
            "optimizer": self.executor.updated_by,
            "parameters": sum(p.numel() for p in self.executor.model.parameters()),
            "step": self.step,
            "world_size": self.groups.layout.world_size,
        }


def _whole(view: BatchView) -> LocalBatch:
    return LocalBatch(view, tuple(range(len(view))), view.lengths)
