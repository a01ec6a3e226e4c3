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
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engines.adapters.resume import adapter_metadata, check_adapter
from engines.capability import Supported, Unsupported, supports
from engines.config import EngineConfig, parse_context_parallel
from engines.dtypes import compute_dtype
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
from engines.nonfinite import FailedStepError, FiniteGuard, finite_tensors
from engines.parallel.planning import Planner, StepPlan
from engines.protocol import Batch, TrainEngine
from engines.scoring.rechecks import Rechecks
from engines.scoring.scored_batch import ScoredBatch
from engines.scoring.several_check import check_several
from engines.storage.checkpoint import load_checkpoint
from engines.storage.directories import fresh_temporary, replace_directory
from engines.storage.writer import CheckpointWriter
from engines.weights.model_weights import ModelWeights
from engines.weights.saving import save_configuration, save_weights
from engines.weights.sizes import PIECE_BYTES as PIECE_BYTES
from engines.weights.weight_pieces import WeightPiece, pieces
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


class Engine:
    """See `engines.protocol.TrainEngine`; made by `build_engine`."""

    def __init__(self, config: EngineConfig, executor: Executor, planner: Planner, weights: ModelWeights) -> None:
        self.config = config
        self.weights = weights
        self.executor = executor
        self.planner = planner
        self.groups = executor.groups
        self.device = executor.device
        self.vision = None if config.vision == "off" else VisionSettings.of(executor.model.config)
        self._routed = routed_sizes(executor.model) if config.routing_replay else (0, 0, 0)
        self.step = 0
        self.reference: TrainEngine | None = None
        self.guard = FiniteGuard(config)
        self.rechecks = Rechecks(config)
        self._offloaded = False
        self._ahead = PrefetchedStep()
        self._writer = CheckpointWriter()

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
        if not self.executor.trainable:
            raise ValueError("this engine was built with trainable=False: it can only score")
        self._check_onloaded()
        check_objective(objective)
        work, micro_batches = self._ready(batch, objective)
        plan, totals = work.plan, work.stats.totals
        if not totals.tokens:
            raise ValueError("no token of the batch is trained: loss_mask is False everywhere")
        loss = StepLoss(objective, totals)
        scoring = scoring_of(objective, self.config.temperature)
        recheck = self.rechecks.begin(self.executor, work.batch, plan.ranks[self.groups.plan_index])
        self.executor.train(micro_batches, loss if recheck is None else recheck.tracked(loss), scoring)
        try:
            found = {} if recheck is None else recheck.metrics(self.executor, self.step + 1)
        except FailedStepError as error:
            error.batch = batch
            raise
        rate = learning_rate(self.config, self.step)
        reduced = loss.start(self.groups.plan)  # before the update, which the host does not wait for then
        update = self.executor.optimizer_step(rate, loss.share(self.device))
        self._ahead.run()
        metrics = self.groups.from_last_stage(reduced())
        try:
            norm = self._take_update(metrics["loss"], update)
        except FailedStepError as error:
            error.batch = batch
            raise
        return (
            metrics
            | found
            | {
                "grad_norm": norm,
                "lr": rate,
                "step": float(self.step),
                "tokens": float(sum(work.batch.lengths)),
                "sequences": float(len(work.batch.lengths)),
                "trained_tokens": float(totals.tokens),
                "computed_tokens": float(sum(work.batch.lengths[row] for row in work.computed)),
                "computed_sequences": float(len(work.computed)),
                "micro_batches": float(plan.num_micro_batches),
                "fill": plan.fill,
                "plan_hash": float(plan.hash),
                "skipped": float(not math.isfinite(norm)),
                "skipped_steps": float(self.guard.skipped),
            }
        )

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

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a step from the lengths of all rows: pure, the same on every rank. ValueError for a row over the cap."""
        return self.planner.plan(lengths)

    def _agree_on(self, batch: Batch, objective: Objective) -> _Work:
        """Check the batch, leave out rows without a gradient, and plan. Collective."""
        if isinstance(batch, LocalBatch):
            return self._agree_on_parts(batch, objective)
        work = self._work(view_batch(batch), objective)
        self._check_agreement("whole", work.plan.hash, work.stats.totals)
        self.planner.prepare(work.plan)
        return work

    def _work(self, view: BatchView, objective: Objective) -> _Work:
        """Check a whole batch, leave out rows without a gradient and plan."""
        local = self._checked(_whole(view), ("loss_mask", *objective.required_keys))
        check_several(view, scoring_of(objective, 1.0), self.executor.model)
        stats = row_stats(view, self._zero_gradient_rows(view, objective))
        computed = tuple(row for row in range(len(view)) if row not in stats.zero_gradient)
        planned = computed or (0,)  # nothing to compute: a plan for one row, without it
        plan = self.planner.plan([view.lengths[row] for row in planned])
        plan = plan.with_rows(planned, view.lengths).without(() if computed else planned)
        return _Work(local, plan, stats, computed)

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
        plan = self.planner.plan(local.lengths)
        self._check_agreement("scores", plan.hash, isinstance(batch, LocalBatch))
        if isinstance(batch, LocalBatch):
            check_held(batch, self._needed(plan), self.groups, self.device)
        self.planner.prepare(plan)
        keys = select_media(local.view, ("input_ids", "position_ids")) + [ROUTED_EXPERTS] * self.config.routing_replay
        found = ScoredBatch(local, scoring, self.groups, self.device)
        keys += [] if tokens is None else [tokens]
        self.executor.score(self._micro_batches(local, plan, keys), found.take, scoring)
        return found.rows(input_ids_of(batch))

    # ------------------------------------------------------------------ weights and files

    def export_weights(self, max_bytes: int = PIECE_BYTES, live: bool = False) -> Iterator[WeightPiece]:
        """Yield the weights as a checkpoint holds them, tied ones once; all ranks iterate to the end together.

        Names, split experts and dtypes are those of the checkpoint that the model came from, and what it held besides
        is carried along; `live` gives names, shapes and dtypes of the module that is trained, for a sampler over the
        same transformers class. A piece may be a view of the weights: read it before the next step.
        `NonFiniteError` for a weight that is not finite.
        """
        self._check_onloaded()
        tensors = finite_tensors(self.executor.tensors())
        return pieces(tensors if live else self.weights.export(tensors), max_bytes)

    def save(
        self,
        directory: str | Path,
        extra: Mapping[str, Any] | None = None,
        wait: bool = True,
        also: Sequence[str | Path] = (),
    ) -> None:
        """Write model, optimizer, step and random state; `directory` appears whole or not at all.

        `extra`: plain JSON of the caller's, such as where its data is, which `load` returns. Without `wait` this
        returns when the state has been copied to host memory, and the rest is written while training goes on; the
        directory appears later. `wait_for_saves`, `load` and the next save wait for it, and raise what went wrong.
        `also`: directories that hold the same (its files under further names): each appears after those before it.
        """
        self._check_onloaded()
        metadata = {"step": self.step, "skipped_steps": self.guard.skipped} | adapter_metadata(self.config.lora)
        metadata["recheck_waited"] = self.rechecks.waited
        metadata["extra"] = dict(extra or {})
        self._writer.save(Path(directory), self.executor.state(), metadata, wait, [Path(path) for path in also])

    def saves_done(self) -> bool:
        """Return whether what `save` began is whole on disk. Local; `wait_for_saves` raises its errors."""
        return self._writer.done

    def wait_for_saves(self) -> None:
        """Wait until what `save` began is on disk; RuntimeError or OSError where it could not be written."""
        self._writer.wait()

    def load(self, directory: str | Path) -> dict[str, Any]:
        """Read what `save` wrote, by this or another number of ranks, and return its `extra`.

        ValueError for one that is damaged, or of another model, base or scale of adapters; all is then as it was.
        """
        self._check_onloaded()
        self._writer.wait()
        state = self.executor.state()
        shared = self.groups.layout.pp > 1 or self.config.distributed_optimizer
        check = partial(check_adapter, self.config, state)
        metadata = load_checkpoint(Path(directory), state, self.groups.world if shared else None, check)
        self.executor.load_state(state)
        self.step = int(metadata["step"])
        self.guard = FiniteGuard(self.config, skipped=int(metadata.get("skipped_steps", 0)))
        self.rechecks = Rechecks(self.config, metadata.get("recheck_waited"), loaded=True)
        return dict(metadata.get("extra", {}))

    def save_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a directory for AutoModelForCausalLM.from_pretrained, in the dtypes of the source or in `dtype`.

        Weights are gathered one tensor at a time; rank 0 holds one file of them in host memory. `NonFiniteError` for
        a weight that is not finite, and after a step that ended a run; the directory is then as it was.
        """
        self._check_onloaded()
        self.guard.check_export()
        target = Path(directory)
        writes = dist.get_rank() == 0
        tensors = self.weights.export(finite_tensors(self.executor.tensors()), dtype, carried=writes)
        if writes:
            made = fresh_temporary(target)
            save_weights(tensors, made)
            save_configuration(self.weights, self.executor.model, made, dtype)
            replace_directory(made, target)
        else:
            deque(tensors, maxlen=0)
        dist.barrier()

    def offload(self) -> None:
        """Move weights and optimizer states to host memory; nothing else works until `onload`."""
        if not self._offloaded:
            self._offloaded = True  # also where the move fails: `onload` brings back what has moved
            self.executor.move(torch.device("cpu"))

    def onload(self) -> None:
        """Move weights and optimizer states back to the device."""
        if self._offloaded:
            self.executor.move(self.device)
            self._offloaded = False

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

    def _check_onloaded(self) -> None:
        if self._offloaded:
            raise ValueError("the engine is offloaded: call onload() first")


def _whole(view: BatchView) -> LocalBatch:
    return LocalBatch(view, tuple(range(len(view))), view.lengths)
