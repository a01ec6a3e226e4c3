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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from engines.capability import No, Yes
from engines.capability import supports as capability
from engines.config import EngineConfig
from engines.execution.executor import Executor, Scores, Scoring
from engines.execution.local_batch import LocalBatch, RowFacts, check_held, facts_of, gather_facts
from engines.execution.loss import StepLoss, check_objective
from engines.execution.metrics import agreed_number, check_agreement
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.execution.nonfinite import FiniteGuard, finite_tensors
from engines.execution.schedule import learning_rate
from engines.loading import compute_dtype
from engines.parallel.planning import Planner, StepPlan
from engines.protocol import Batch
from engines.storage.checkpoint import load_checkpoint, save_checkpoint
from engines.storage.directories import fresh_temporary, replace_directory
from engines.weights.model_weights import ModelWeights
from engines.weights.pieces import WeightPiece, pieces
from engines.weights.saving import save_configuration, save_weights
from seqpack.batches.batch import view_batch
from seqpack.batches.jagged import jagged_from_values
from seqpack.batches.objective import Objective
from seqpack.batches.view import BatchView

PIECE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class _Work:
    """A step that the ranks agreed on."""

    batch: LocalBatch
    plan: StepPlan
    facts: RowFacts
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
        self.step = 0
        self.guard = FiniteGuard(config)
        self._offloaded = False

    # ------------------------------------------------------------------ training

    def train_batch(self, batch: Batch, objective: Objective) -> dict[str, float]:
        """Make one optimizer step: plan, pack, accumulate over micro-batches, clip, update.

        Every rank gives the same whole batch, or the rows that it holds as a `LocalBatch`. Besides the objective's
        metrics: loss, grad_norm, lr, step, tokens, sequences, trained_tokens, computed_tokens and computed_sequences
        (what `skip_zero_gradient_rows` left), micro_batches (of a rank), fill, plan_hash, skipped (1 where no update
        was made) and skipped_steps (so far). `NonFiniteError` where loss or gradient are not finite, see
        `EngineConfig.on_nonfinite`; ValueError for a batch or objective that cannot be trained on.
        """
        if not self.executor.trainable:
            raise ValueError("this engine was built with trainable=False: it can only score")
        self._check_onloaded()
        check_objective(objective)
        work = self._agree_on(batch, objective)
        plan, totals = work.plan, work.facts.totals
        if not totals.tokens:
            raise ValueError("no token of the batch is trained: loss_mask is False everywhere")
        loss = StepLoss(objective, totals)
        scoring = Scoring(self.config.temperature, objective.needs_entropy)
        self.executor.train(self._micro_batches(work.batch, plan), loss, scoring)
        metrics = self.groups.from_last_stage(loss.metrics.reduce(self.groups.plan))
        norm, rate = self._update(metrics["loss"])
        return metrics | {
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

    def plan(self, lengths: Sequence[int]) -> StepPlan:
        """Plan a step from the lengths of all rows: pure, the same on every rank. ValueError for a row over the cap."""
        return self.planner.plan(lengths)

    def _agree_on(self, batch: Batch, objective: Objective) -> _Work:
        """Check the batch, leave out rows without a gradient and plan. Collective."""
        if isinstance(batch, LocalBatch):
            return self._agree_on_parts(batch, objective)
        view = view_batch(batch)
        local = _whole(view)
        local.require(("loss_mask", *objective.required_keys))
        facts = facts_of(view, self._zero_gradient_rows(view, objective))
        kept = tuple(row for row in range(len(view)) if row not in facts.zero_gradient)
        planned = kept or (0,)  # nothing to compute: a plan for one row, without it
        plan = self.planner.plan([view.lengths[row] for row in planned])
        self._check_agreement("whole", plan.hash, facts.totals)
        self.planner.prepare(plan)
        plan = plan.renumbered(planned, view.lengths).without(() if kept else planned)
        return _Work(local, plan, facts, kept)

    def _agree_on_parts(self, batch: LocalBatch, objective: Objective) -> _Work:
        """The same where ranks hold parts: the plan is of all lengths, and rows are left out where they are."""
        batch.require(("loss_mask", *objective.required_keys))
        plan = self.planner.plan(batch.lengths)
        self._check_agreement("parts", plan.hash, batch.lengths)
        zero = self._zero_gradient_rows(batch.view, objective)
        facts = gather_facts(batch, zero, self._needed(plan), self.groups, self.device)
        self.planner.prepare(plan)
        kept = tuple(row for row in range(len(batch.lengths)) if row not in facts.zero_gradient)
        return _Work(batch, plan.without(facts.zero_gradient), facts, kept)

    def _needed(self, plan: StepPlan) -> list[int]:
        return [row for part in plan.ranks[self.groups.plan_index] for row in part.rows]

    def _zero_gradient_rows(self, view: BatchView, objective: Objective) -> Tensor | None:
        if self.executor.adds_loss or not self.config.skip_zero_gradient_rows:
            return None
        return objective.zero_gradient_rows(view)

    def _check_agreement(self, *facts: object) -> None:
        check_agreement(agreed_number(facts), "the plan of this step", self.device, self.groups.world)

    def _micro_batches(self, batch: LocalBatch, plan: StepPlan, keys: Sequence[str] | None = None) -> MicroBatches:
        parts = plan.ranks[self.groups.plan_index]
        return MicroBatches(batch, parts, self.planner.group, self.device, keys)

    def _update(self, loss: float) -> tuple[float, float]:
        """(gradient norm, learning rate) of one optimizer step; none is made where loss or gradient are not finite."""
        rate = learning_rate(self.config, self.step)
        norm = self.executor.optimizer_step(rate) if math.isfinite(loss) else math.nan
        self.guard.check(self.step + 1, loss, norm)
        if math.isfinite(norm):
            self.step += 1
        return norm, rate

    # ------------------------------------------------------------------ scoring

    @torch.no_grad()
    def forward(self, batch: Batch, entropy: bool = False, temperature: float | None = None) -> TensorDict:
        """Score every token but the first of each row: jagged float32 `log_probs` (and `entropy`), 0 at first tokens.

        All rows of a whole batch on every rank; of a `LocalBatch` the rows that the rank holds. On the batch's device.
        `temperature` overrides the configuration's. Dropout adds no noise.
        """
        self._check_onloaded()
        local = batch if isinstance(batch, LocalBatch) else _whole(view_batch(batch))
        local.require(())
        plan = self.planner.plan(local.lengths)
        self._check_agreement("scores", plan.hash, isinstance(batch, LocalBatch))
        if isinstance(batch, LocalBatch):
            check_held(batch, self._needed(plan), self.groups, self.device)
        self.planner.prepare(plan)
        keys = [key for key in ("input_ids", "position_ids") if key in local.view]
        starts = torch.tensor([0, *local.lengths]).cumsum(0).to(self.device)
        flat = torch.zeros((2 if entropy else 1, sum(local.lengths)), dtype=torch.float32, device=self.device)

        def take(micro_batch: MicroBatch, scores: Scores) -> None:
            # Ranks that share a micro-batch all have its scores, and they are added over ranks: the first gives them.
            if micro_batch.dummy or micro_batch.ranks[0] != self.groups.plan_index:
                return
            found = [scores.log_probs] if scores.entropy is None else [scores.log_probs, scores.entropy]
            flat[:, _tokens_of(micro_batch, starts)] = torch.stack([row.float() for row in found])

        scoring = Scoring(self.config.temperature if temperature is None else temperature, entropy)
        self.executor.score(self._micro_batches(local, plan, keys), take, scoring)
        return _scored_batch(self.groups.sum(flat), local, starts, entropy)

    # ------------------------------------------------------------------ weights and files

    def export_weights(self, max_bytes: int = PIECE_BYTES, live: bool = False) -> Iterator[WeightPiece]:
        """Yield the weights as a checkpoint holds them, tied ones once; all ranks iterate to the end together.

        Names, split experts and dtypes are those of the checkpoint that the model came from, and what it held besides
        is carried along; `live` gives names, shapes and dtypes of the module that is trained, for a sampler over the
        same transformers class. `NonFiniteError` for a weight that is not finite.
        """
        self._check_onloaded()
        tensors = finite_tensors(self.executor.tensors())
        return pieces(tensors if live else self.weights.export(tensors), max_bytes)

    def save(self, directory: str | Path) -> None:
        """Write model, optimizer, step and random state; `directory` appears whole or not at all."""
        self._check_onloaded()
        facts = {"step": self.step, "skipped_steps": self.guard.skipped}
        save_checkpoint(Path(directory), self.executor.state(), facts)

    def load(self, directory: str | Path) -> None:
        """Read what `save` wrote, by this or another number of ranks. ValueError for a checkpoint of another model."""
        self._check_onloaded()
        state = self.executor.state()
        parts = self.groups.pipeline if self.groups.layout.pp > 1 else None
        facts = load_checkpoint(Path(directory), state, parts)
        self.executor.load_state(state)
        self.step = int(facts["step"])
        self.guard = FiniteGuard(self.config, skipped=int(facts.get("skipped_steps", 0)))

    def save_hf(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write a directory for AutoModelForCausalLM.from_pretrained, in the dtypes of the source or in `dtype`.

        Weights are gathered one tensor at a time; rank 0 holds one file of them in host memory. `NonFiniteError` for
        a weight that is not finite, or after a step that made no update; the directory is then as it was.
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
        self.executor.move(torch.device("cpu"))
        self._offloaded = True

    def onload(self) -> None:
        """Move them back to the device."""
        self.executor.move(self.device)
        self._offloaded = False

    def supports(self, feature: str) -> Yes | No:
        """See `engines.capability`."""
        return capability(self.config, feature)

    def state_summary(self) -> dict[str, Any]:
        """Plain facts for logs."""
        return {
            "backend": self.config.backend,
            "batching": self.config.batching,
            "device": str(self.device),
            "dtype": str(compute_dtype(self.config, self.device)).removeprefix("torch."),
            "layout": str(self.groups.layout),
            "parameters": sum(p.numel() for p in self.executor.model.parameters()),
            "step": self.step,
            "world_size": self.groups.layout.world_size,
        }

    def _check_onloaded(self) -> None:
        if self._offloaded:
            raise ValueError("the engine is offloaded: call onload() first")


def _whole(view: BatchView) -> LocalBatch:
    return LocalBatch(view, tuple(range(len(view))), view.lengths)


def _tokens_of(micro_batch: MicroBatch, starts: Tensor) -> Tensor:
    """i64[T]: where the tokens of a micro-batch lie among those of the whole batch."""
    packed = micro_batch.packed
    cu_seqlens = packed.cu_seqlens.to(torch.int64)
    rows = torch.tensor(micro_batch.rows, device=starts.device)
    shift = starts[rows] - cu_seqlens[:-1]
    return torch.repeat_interleave(shift, cu_seqlens.diff()) + torch.arange(packed.num_tokens, device=starts.device)


def _scored_batch(flat: Tensor, batch: LocalBatch, starts: Tensor, entropy: bool) -> TensorDict:
    """The rows that are held, of flat scores f32[k, tokens of the whole batch]."""
    lengths = batch.view.lengths
    if batch.rows != tuple(range(len(batch.lengths))):
        rows, sizes = torch.tensor(batch.rows, device=flat.device), torch.tensor(lengths, device=flat.device)
        ends = sizes.cumsum(0)
        index = torch.repeat_interleave(starts[rows] - ends + sizes, sizes)
        flat = flat[:, index + torch.arange(sum(lengths), device=flat.device)]
    flat = flat.to(batch.view.device)
    names = ("log_probs", "entropy") if entropy else ("log_probs",)
    columns = {name: jagged_from_values(flat[i], lengths) for i, name in enumerate(names)}
    return TensorDict(columns, batch_size=[len(lengths)])
