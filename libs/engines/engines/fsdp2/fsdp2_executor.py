"""The FSDP2 executor: every layer sharded over all ranks or copies of it over groups, micro-batches in a loop."""

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from engines.adapters.base_digest import BASE, base_digest
from engines.adapters.lora import (
    is_adapter,
    merged_tensors,
    reset_adapters,
    whole,
    without_adapters,
)
from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.devices.detect import devices_of
from engines.devices.host_copies import HostCopies
from engines.execution.early_host_read import EarlyRead
from engines.execution.executor import LossFunction, Scores, Scoring, TakeScores, collected
from engines.execution.learning_rates import rate_scales
from engines.execution.memory import StateTensors, register_states
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.execution.muon import Place
from engines.execution.optimizer import build_optimizer, clip_and_step, gradient_norm, name_of
from engines.execution.prefetch import PrefetchedMicroBatches
from engines.experts.placement import place_experts
from engines.families.registry import family_of
from engines.families.router import RouterCounts, RouterLoss
from engines.fast.layers import sequences_of
from engines.fast.support import LAYERS
from engines.fsdp2.host_offload import moments, move_all, move_moments
from engines.fsdp2.prepared_model import prepare_model
from engines.fsdp2.sharding import SumAcrossCopies, copies_in, lies_whole, move_buffers, weight_mesh
from engines.fsdp2.sharding import whole as whole_shards
from engines.inputs.equal_rows import inputs_of_distinct_rows, merges_rows
from engines.inputs.model_inputs import InputBuilder, ModelInputs, PackedInputs, PaddedInputs
from engines.inputs.shared_prefixes import shares_prefixes, with_shared_prefixes
from engines.loading import DTYPES, compute_dtype, device_of
from engines.mtp.head import trains_head, units_of
from engines.parallel.groups import ParallelGroups
from engines.scoring.compiled_model import log_probs_by
from engines.scoring.mtp_scores import collected_mtp
from engines.scoring.plain_scores import stock_modules
from engines.scoring.router_counts import agreed, can_be_given, check_forwards_ahead, given_counts
from engines.scoring.token_scorer import ModelScores, TokenScorer
from engines.weights.disk_names import OWN_NAMES, DiskNames
from engines.weights.disk_weights import DiskWeights
from engines.weights.empty_model import allocate
from engines.weights.model_weights import live_tensors
from engines.weights.shard_export import LiveShard, rows_held
from seqpack.memory import ledger

PLAIN = Unsupported("not asked for")


class _Forward(NamedTuple):
    """A forward pass: its micro-batch, inputs and scores."""

    micro_batch: MicroBatch
    inputs: ModelInputs
    scores: ModelScores


class FSDP2Executor:
    """See `engines.execution.executor.Executor`.

    The model stays in evaluation mode in training too: dropout is never applied, so that the trained policy is the one
    that was scored (the ratio of a first update is 1) and packed rows equal padded ones. Only recomputed layers are in
    training mode themselves, because transformers looks there.
    """

    def __init__(
        self,
        config: EngineConfig,
        groups: ParallelGroups,
        model: Any,
        inputs: InputBuilder,
        trainable: bool = True,
        compiled: Supported | Unsupported = PLAIN,
        disk: DiskWeights | None = None,
        names: DiskNames = OWN_NAMES,
    ) -> None:
        """Shard `model` (a transformers causal LM on the device, or empty), which becomes the executor's.

        `compiled`: whether its layers and head run as compiled functions, and why not (`engines.fast.support`).
        `disk`: where the values of an empty model are; each rank reads its rows after sharding. `names`: of the
        parameters on disk, for `config.learning_rates`.
        """
        self.config = config
        self.groups = groups
        self.builder = inputs
        self.trainable = trainable
        self.model: Any = model
        self._digest: Tensor | None = None
        self.device = device_of(config, model)
        self._merges = merges_rows(inputs, model, self.device)
        self._shares = self._merges and shares_prefixes(model)
        self.compiled = compiled
        self.npu_operators, self.packing = prepare_model(config, model, self.device, compiled, trainable)
        scales = rate_scales(config, model, names) if trainable else {}
        self.scales = {f"model.{name}": scale for name, scale in scales.items()}  # as the scorer names them
        log_probs = log_probs_by(compiled, model.config)
        coefficients = config.router_aux_loss_coef, config.router_z_loss_coef
        self.scorer: Any = TokenScorer(model, config.logit_chunk, log_probs, *coefficients)
        self.scorer.training = False
        self.router: RouterLoss | None = self.scorer.router
        self._run_ahead = config.router_forwards_ahead or 0
        check_forwards_ahead(self._run_ahead, self.router)
        self.adds_loss = self.router is not None or trains_head(config)
        self._balances = trainable and self.router is not None and self.router.coefficient != 0
        self._host = HostCopies()
        self.sums: SumAcrossCopies | None = None
        self._shard(disk)
        self.adapted = any(is_adapter(name) for name, _ in model.named_parameters())
        if self.adapted:
            reset_adapters(model, torch.initial_seed())
        self.optimizer = self._build_optimizer() if trainable else None
        register_states(self)

    @property
    def updated_by(self) -> str:
        """See `Executor`."""
        return name_of(self.optimizer)

    @property
    def memory(self) -> StateTensors:
        """See `StateTensors`."""
        moving = () if self.optimizer is None else moments(self.optimizer)
        weights = [*self.scorer.parameters(), *self.scorer.buffers()]
        return StateTensors(
            weights, [one.grad for one in weights if one.grad is not None], [*moving], self._host.blocks
        )

    def _build_optimizer(self) -> torch.optim.AdamW | None:
        return build_optimizer(self.scorer, self.config, self.scales, Place(self.groups.world, self.device))

    def _shard(self, disk: DiskWeights | None) -> None:
        dtype = compute_dtype(self.config, self.device)
        mesh = weight_mesh(self.config, self.device.type)
        if lies_whole(self.config, self.model, self.device, dtype):
            if disk is not None:
                allocate(self.model, self.device)
                disk.fill(self.model)
            return
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        free = self.config.reshard_after_forward
        options: dict[str, Any] = {"mp_policy": policy}
        if self.config.parameters_on_host:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=self.device.type == "cuda")
        if self.config.expert_parallel > 1:
            experts, rows = place_experts(self.model, self.config.expert_parallel, self.device.type)
            for module in experts:
                fully_shard(
                    module, mesh=rows, reshard_after_forward=free, shard_placement_fn=lambda _: Shard(1), **options
                )
        for layer in (*family_of(self.model.config).units(self.model), *units_of(self.model)):
            fully_shard(layer, mesh=mesh, reshard_after_forward=free, **options)
        fully_shard(self.scorer, mesh=mesh, reshard_after_forward=False, **options)
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by global counts already: gradients are summed over ranks, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        if copies_in(mesh) > 1:
            self.sums = SumAcrossCopies(self.scorer)
        if disk is not None:
            self.scorer.to_empty(device="cpu" if self.config.parameters_on_host else self.device)
            move_buffers(self.scorer, self.device)
            disk.fill(self.model)

    def ahead(self, micro_batches: MicroBatches) -> MicroBatches:
        """Prepare them while the device works; on a CPU there is nothing to overlap."""
        if not devices_of(self.device).overlaps or isinstance(micro_batches, PrefetchedMicroBatches):
            return micro_batches
        return PrefetchedMicroBatches(micro_batches, self._inputs)

    def _inputs(self, micro_batch: MicroBatch) -> ModelInputs:
        """Build the model's inputs, with what compiled layers need of them."""
        inputs = self.builder.inputs(micro_batch)
        if self.compiled == LAYERS and inputs.context is not None:
            sequences_of(inputs.context, self.model.config.get_text_config())
        return inputs

    def train(
        self,
        micro_batches: MicroBatches,
        loss: LossFunction,
        scoring: Scoring,
        add: bool = False,
        counts: RouterCounts | None = None,
    ) -> None:
        """Run forward and backward of one micro-batch after another."""
        if not add:
            self._optimizer.zero_grad(set_to_none=True)
        scored = self._scored(micro_batches, scoring, counts)
        for micro_batch, scores in scored if self.sums is None else self.sums.each(scored, len(micro_batches)):
            loss(micro_batch, scores).backward()
            del scores  # else its graph would live through the next forward pass

    def _scored(
        self, micro_batches: MicroBatches, scoring: Scoring, counts: RouterCounts | None
    ) -> Iterator[tuple[MicroBatch, Scores]]:
        """Yield the micro-batches of a step in order, each with its scores; see `engines.scoring.router_counts`."""
        if counts is None and self.router is not None:
            counts = self._known_counts(self.router, micro_batches)
        ahead = 0 if self.router is None or counts is not None else 1 + self._run_ahead
        left = [self._counted(one) for one in islice(micro_batches, ahead, None)] if ahead else []
        coming = iter(self.ahead(micro_batches))
        if ahead:
            kept = deque(self._forward(one, scoring, routing=True) for one in islice(coming, ahead))
            sums = torch.stack([*left, *map(self._own_counts, kept)]).sum(0)
            counts = agreed(sums, self.groups.plan)
            while kept:
                forward = kept.popleft()
                yield forward.micro_batch, self._collected(forward, counts)
                del forward
        for micro_batch in coming:
            yield micro_batch, self._scores(micro_batch, scoring, counts)

    @torch.no_grad()
    def _known_counts(self, router: RouterLoss, micro_batches: MicroBatches) -> RouterCounts | None:
        """Return the counts of a step where inputs say them; None where they do not say all. Collective."""
        if not can_be_given(router, self.config.routing_replay):
            return None
        dtype = torch.promote_types(torch.float32, next(self.scorer.parameters()).dtype)
        sums = torch.stack([self._given(router, one, dtype) for one in micro_batches]).sum(0)
        dist.all_reduce(sums, group=self.groups.plan)
        return None if sums[-1] else RouterCounts(sums[:-2], sums[-2])

    def _given(self, router: RouterLoss, micro_batch: MicroBatch, dtype: torch.dtype) -> Tensor:
        inputs = micro_batch.inputs or self._inputs(micro_batch)
        return self.builder.total(given_counts(router, inputs, dtype), inputs) * micro_batch.loss_weight

    @torch.no_grad()
    def _counted(self, micro_batch: MicroBatch) -> Tensor:
        """Run forward without the head, and return what the router chose."""
        inputs = micro_batch.inputs or self._inputs(micro_batch)
        scores: ModelScores = self.scorer(inputs, 1.0, False, routing=True, head=False)
        return self._own_counts(_Forward(micro_batch, inputs, scores))

    @torch.no_grad()
    def _own_counts(self, forward: _Forward) -> Tensor:
        """Return f32[E + 1]: the choices of each expert, and rows; ranks with one micro-batch count shares of it."""
        routing = forward.scores.routing
        assert routing is not None, "it was asked for"
        counts = torch.cat([routing.chosen, routing.rows[None]])
        return self.builder.total(counts, forward.inputs) * forward.micro_batch.loss_weight

    @torch.no_grad()
    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> RouterCounts | None:
        """Run forward of one micro-batch after another; count for the balancing loss of a step."""
        counts = []
        for micro_batch in self.ahead(micro_batches):
            forward = self._forward(micro_batch, scoring, self._balances)
            counts += [self._own_counts(forward)] if self._balances else []
            take(micro_batch, self._collected(forward, None))
        if isinstance(self.scorer, FSDPModule):
            self.scorer.reshard()  # without a backward pass the outermost weights would stay gathered
        return agreed(torch.stack(counts).sum(0), self.groups.plan) if counts else None

    @torch.no_grad()
    def score_plain(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """See `engines.scoring.rechecks.PlainScores`: stock modules, called with one row at a time."""
        assert isinstance(self.builder, PackedInputs)
        builder = PaddedInputs(vision=self.builder.vision, replay=self.builder.replay)
        with stock_modules(self.model, self.packing):
            for micro_batch in micro_batches:
                inputs = builder.inputs(micro_batch)
                scores = self.scorer(inputs, scoring.temperature, False, plain=True)
                take(micro_batch, Scores(builder.collect(scores.log_probs, inputs)))
        if isinstance(self.scorer, FSDPModule):
            self.scorer.reshard()

    def _scores(self, micro_batch: MicroBatch, scoring: Scoring, counts: RouterCounts | None = None) -> Scores:
        return self._collected(self._forward(micro_batch, scoring, counts is not None), counts)

    def _forward(self, micro_batch: MicroBatch, scoring: Scoring, routing: bool) -> _Forward:
        inputs = micro_batch.inputs
        if inputs is None and self._merges and scoring.tokens is None:
            inputs = inputs_of_distinct_rows(micro_batch, self._inputs)
            inputs = with_shared_prefixes(inputs) if self._shares else inputs
        inputs = inputs or self._inputs(micro_batch)
        several = scoring.several(micro_batch.packed, inputs.slots)
        options = {"routing": routing, "several": several, "mtp": scoring.mtp}
        return _Forward(micro_batch, inputs, self.scorer(inputs, scoring.temperature, scoring.entropy, **options))

    def _collected(self, forward: _Forward, counts: RouterCounts | None) -> Scores:
        inputs, scores, auxiliary = forward.inputs, forward.scores, None
        if counts is not None and self.router is not None and scores.routing is not None:
            auxiliary = self.router.loss(self.builder.total(scores.routing.terms, inputs), counts)
        every = collected(lambda x: self.builder.collect(x, inputs), scores.log_probs, scores.entropy, scores.several)
        mtp = collected_mtp(self.builder, inputs, scores.mtp)
        return replace(every, auxiliary=auxiliary, load=scores.load, mtp=mtp)

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> SupportsFloat:
        """Clip the gradient, and update by AdamW where the norm is finite."""
        ledger.observe(self, ledger.GRADIENTS)
        norm = gradient_norm(self.scorer, loss, self.groups.world)
        known = EarlyRead(norm)
        clip_and_step(self.scorer, self._optimizer, norm, adam, lr)
        self._optimizer.zero_grad(set_to_none=True)
        return known

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather one tensor after another, with adapters merged into their weights."""
        if self.adapted:
            yield from merged_tensors(self.model, DTYPES[self.config.master_dtype])
            return
        for name, tensor in live_tensors(self.model).items():
            yield name, whole_shards(tensor)

    def shards(self) -> Iterator[LiveShard]:
        """Yield this rank's rows of every tensor, in place."""
        for name, tensor in live_tensors(self.model).items():
            if (held := rows_held(name, tensor)) is not None:
                yield held

    def held(self) -> dict[str, Tensor]:
        """Return the live tensors by name, this rank's part of each in place (`engines.weight_sharing`)."""
        return live_tensors(self.model)

    def state(self) -> dict[str, Any]:
        """Return live shards by name (tied weights once); loading writes into them.

        Of a model with adapters these alone, and the digest of the base that they belong to.
        """
        saved = self.scorer.state_dict()
        tensors = dict(self.scorer.named_parameters()) | {
            name: value for name, value in self.scorer.named_buffers() if name in saved
        }
        if self.adapted:
            tensors = {name: t for name, t in tensors.items() if is_adapter(name)} | {BASE: self._base().clone()}
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in tensors.items()}}
        if self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.scorer, self.optimizer)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the optimizer's states; the weights were read in place."""
        if self.optimizer is not None:
            set_optimizer_state_dict(self.scorer, self.optimizer, state["optimizer"])

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather the adapters, one tensor after another."""
        return ((name, whole(p)) for name, p in self.model.named_parameters() if is_adapter(name))

    def without_adapters(self) -> AbstractContextManager[None]:
        """Switch the adapters off inside the block: the model is the base alone. ValueError where there are none."""
        return without_adapters(self.model)

    def move(self, device: torch.device) -> None:
        """Move weights and the optimizer's moments, unless they are kept on the host."""
        if self.config.parameters_on_host:
            move_buffers(self.scorer, device)
        elif self.optimizer is None or self.config.optimizer_on_host:
            move_all(self.scorer, (), device, self._host)
        else:
            move_moments(self.optimizer, move_all(self.scorer, moments(self.optimizer), device, self._host))
        devices_of(self.device).release()

    def _base(self) -> Tensor:
        """Return u8[16], the digest of the adapters' base. It never changes."""
        if self._digest is None:
            self._digest = base_digest(self.model, self.groups.world)
        return self._digest

    @property
    def _optimizer(self) -> torch.optim.AdamW:
        assert self.optimizer is not None, "the engine refuses to train without an optimizer"
        return self.optimizer
