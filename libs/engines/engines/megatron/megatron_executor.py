"""The Megatron executor: megatron-core's pipeline schedules, gradient buffers and parallel layers under the step.

1. A transformers model gives its weights to megatron-core's stages through the bridge, and stays as names and shapes.
2. `train` hands all micro-batches to megatron-core's schedule. The last stage turns hidden states into log-probs over
   the shared vocabulary and calls the loss; nothing divides a gradient, since the loss has global counts already.
3. megatron-core adds gradients up: over the ranks that split a batch, over tensor-parallel ranks where each has a copy
   and sees a part, over first and last stage for a tied embedding.
4. `optimizer_step` counts every parameter once for the norm (the owner of the bridge), and updates.

Invariant, tested over layouts: losses, norms, scores, weights and exports are those of one process.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from engines.adapters.base_digest import BASE
from engines.adapters.lora import is_adapter, set_trainable
from engines.capability import Supported, Unsupported
from engines.config import EngineConfig, parse_options
from engines.devices.detect import devices_of
from engines.execution.executor import LossFunction, Scores, Scoring
from engines.execution.learning_rates import rate_scales
from engines.execution.memory import StateTensors, register_states
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.families.router import RouterCounts
from engines.inputs.model_inputs import InputBuilder, ModelInputs
from engines.loading import compute_dtype, resolve_device
from engines.megatron.config.model_sizes import ModelSizes, refuse_unsupported_model, stage_sizes
from engines.megatron.config.transformer_config import transformer_config
from engines.megatron.external_mappings.weight_map import weight_map
from engines.megatron.gpu.fused_layers import fused_pieces, use_fused_pieces
from engines.megatron.model.attention import PackedTokens
from engines.megatron.model.even_inputs import EvenInputs, even_rounds
from engines.megatron.model.mtp_head import share_embedding
from engines.megatron.model.packed_gpt import PackedGPT, angles, build_stages, rotary_of
from engines.megatron.model.plain_scoring import PlainScoring
from engines.megatron.model.router import Balance, Router, balance_of
from engines.megatron.model.vision import Tower, frozen_in, taken_over, tower_shapes, trained_in
from engines.megatron.npu.layers import use_npu_operators
from engines.megatron.optimizers.optimizer_selection import updates_for
from engines.megatron.runtime.buffer_offload import Moved
from engines.megatron.runtime.cuda_calls import adapted
from engines.megatron.runtime.gradient_buffers import fresh_gradients, with_buffers
from engines.megatron.runtime.process_groups import ensure_groups
from engines.megatron.weights.adapter_weights import (
    Adapters,
    FirstValues,
    frozen_digest,
    frozen_values,
    with_adapters,
)
from engines.megatron.weights.bridge import MappedParameter, Place, Shape
from engines.megatron.weights.parameters import (
    HeldParameter,
    Part,
    boxed,
    fill,
    live_shards,
    match,
    whole_tensors,
    zero_padding,
)
from engines.mtp.head import trains_head
from engines.muon.matrices import muon_matrices
from engines.parallel.groups import ParallelGroups
from engines.parallel.stages import Split
from engines.weights.disk_names import OWN_NAMES, DiskNames
from engines.weights.disk_weights import DiskTensors, DiskWeights
from engines.weights.model_weights import live_tensors
from engines.weights.shard_export import LiveShard


class MegatronExecutor(PlainScoring):
    """See `engines.execution.executor.Executor`."""

    def __init__(
        self,
        config: EngineConfig,
        groups: ParallelGroups,
        model: Any,
        inputs: InputBuilder,
        trainable: bool = True,
        disk: DiskWeights | None = None,
        names: DiskNames = OWN_NAMES,
    ) -> None:
        """Take over `model`, a transformers causal LM: its weights move into megatron-core's, and it keeps none.

        `disk`: where the values of an empty model are; each rank reads only its parts. `names`: of the parameters on
        disk, for `config.learning_rates`. ValueError for what `engines.megatron.config.model_sizes` does not support.
        """
        refuse_unsupported_model(config, model.config, groups.layout)
        ensure_groups(groups.layout, config.virtual_pipeline_parallel)
        self.config = config
        self.groups = groups
        self.trainable = trainable
        self.builder = EvenInputs(inputs, groups.layout.tp)
        self.device = resolve_device(config)
        dtype = _dtype(config, model, self.device)
        self.balance = balance_of(config, model.config, self.device, dtype)
        self.adds_loss = self.balance is not None or trains_head(config)
        self._run_ahead = _forwards_ahead(config)
        self.compiled: Supported | Unsupported = fused_pieces(config, model.config, self.device, dtype)
        self.rotary = copy.deepcopy(rotary_of(model)).to(self.device)
        sizes = (weights := weight_map(model)).sizes
        self.shapes = with_adapters({**tower_shapes(model), **weights.shapes}, model)
        self.adapters = Adapters(config.lora) if any(map(is_adapter, self.shapes)) else None
        set_trainable(model, trainable)
        scales = rate_scales(config, model, names) if trainable else None
        matrices = muon_matrices(config, model)
        self._dtypes = {name: p.dtype for name, p in model.named_parameters() if not is_adapter(name)}
        self._digest: Tensor | None = None
        self.place = Place.of(groups.layout, groups.rank)
        self.vocabulary = sizes.vocabulary_of(self.place.at.tp, groups.layout.tp)
        options, stages = parse_options(config.transformer_options), stage_sizes(config)
        self.settings = transformer_config(sizes, groups.layout, dtype, stages, options)
        split = stages.split(len(sizes.layer_types), groups.layout.pp)
        with adapted(self.device):
            self.stages = self._built(sizes, split)
            self.tower = Tower.of(model, self.place, dtype, self.device, trainable and config.vision == "trained")
            self.parameters = self._matched(weights.held(self.stages, self.place, split))
            self.chunks = self._made_chunks()
            trained, frozen = ([p for p in self.parameters if p.parameter.requires_grad is x] for x in (True, False))
            self.updates, self.updated_by = updates_for(config, self.chunks, trained, groups.world, scales, matrices)
            disk_dtypes = self._dtypes if trainable else {}
            self.seeing = [frozen_values(one, disk_dtypes) for one in frozen_in(self.tower)]
            self.frozen = [*(frozen_values(one, disk_dtypes) for one in frozen), *self.seeing]
            self._fill(live_tensors(model) if disk is None else DiskTensors(disk))
            if self.updates is not None:
                self.updates.publish()
        self.model = model.to("meta")
        self._moved = Moved()
        register_states(self)

    @property
    def memory(self) -> StateTensors:
        """See `StateTensors`. A master that lies in its weight's memory is one with it."""
        held = [tensor.detach() for stage in self.stages for tensor in (*stage.parameters(), *stage.buffers())]
        held += [*(one.parameter for one in frozen_in(self.tower)), *(values for _, values in self.frozen)]
        chunks = self.chunks if self.trainable else ()
        buffers = (buffer for chunk in chunks for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers))
        states = [] if self.updates is None else self.updates.tensors()
        return StateTensors(held, [buffer.grad_data for buffer in buffers], states, self._moved.host.blocks)

    def _built(self, sizes: ModelSizes, split: Split) -> list[PackedGPT]:
        """Make this rank's stages on its device; their routers share `balance`."""
        stages = build_stages(sizes, self.groups.layout, self.settings, split, self.config.gradient_checkpointing)
        for stage in stages:
            use_npu_operators(stage.to(self.device), self.config)
            if isinstance(self.compiled, Supported):
                use_fused_pieces(stage)
            for module in stage.modules():
                if isinstance(module, Router):
                    module.balance = self.balance
        return stages

    def _matched(self, mapped: Sequence[MappedParameter]) -> tuple[HeldParameter, ...]:
        """Match this rank's parameters with the weights that they hold, adapters and a trained tower among them."""
        if self.adapters is not None:
            mapped = self.adapters.added(self.stages, mapped, self.shapes, self.place)
        parameters = match(self.stages, (*mapped, *trained_in(self.stages[0], self.tower)))
        zero_padding(parameters)
        return parameters

    def _made_chunks(self) -> list[Any]:
        """Return the stages in megatron-core's gradient buffers, or frozen where nothing is trained."""
        if not self.trainable:
            return [stage.requires_grad_(False) for stage in self.stages]
        return with_buffers(self.stages, self.settings, self.config.distributed_optimizer)

    def _fill(self, tensors: Mapping[str, Any]) -> None:
        """Fill every part, and frozen parameters from their more exact copies."""
        fill(self._parts(), FirstValues(tensors, self.shapes, torch.initial_seed()))
        taken_over(dict(self.frozen))

    def ahead(self, micro_batches: MicroBatches) -> MicroBatches:
        """Return the micro-batches unchanged: nothing is prepared in the background."""
        return micro_batches

    def train(
        self,
        micro_batches: MicroBatches,
        loss: LossFunction,
        scoring: Scoring,
        add: bool = False,
        counts: RouterCounts | None = None,
    ) -> None:
        """Run megatron-core's schedule, which ends by summing gradients over ranks.

        A router's loss needs the counts of the whole step before the first backward pass. The first forward passes run
        ahead and give theirs; a pass without gradients counts the others (and all of them where there are stages, whose
        schedule begins with backward passes early). `counts` of a scoring pass spare both.
        """
        if scoring.mtp:
            share_embedding(self.stages, self.stages[0].share_embeddings_and_output_weights)
        with fresh_gradients(self.chunks, add):
            if self.balance is None:
                self._run(micro_batches, loss, scoring, forward_only=False)
                return
            micro_batches = even_rounds(micro_batches, self.groups, len(self.stages))
            balance, shares = self.balance, len(micro_batches) * self.groups.layout.plan_size
            balance.begin()
            ahead = 0 if self.groups.layout.pp > 1 else min(1 + self._run_ahead, len(micro_batches))
            if counts is not None:
                ahead = 0
                balance.take(counts)
            elif not ahead:
                self._count(balance, micro_batches)

            def with_auxiliary(micro_batch: MicroBatch, scores: Scores) -> Tensor:
                # The value alone: its gradient is added where the routers are. Ranks that share one are weighed.
                value = scores.log_probs.new_tensor(balance.total / shares * len(micro_batch.ranks))
                return loss(micro_batch, replace(scores, auxiliary=value))

            self._run(micro_batches, with_auxiliary, scoring, forward_only=False, counting=True, ahead=ahead)

    @torch.no_grad()
    def _count(self, balance: Balance, micro_batches: MicroBatches) -> None:
        """Run forward on all micro-batches, and count what the routers of all stages choose in them."""
        nothing = torch.zeros((), device=self.device)
        self._run(micro_batches, lambda *_: nothing, None, forward_only=True, counting=True)
        balance.counted_all(self.groups.world)

    def _run(
        self,
        micro_batches: MicroBatches,
        finish: Callable[[MicroBatch, Any], Tensor],
        scoring: Scoring | None,
        forward_only: bool,
        counting: bool = False,
        ahead: int = 0,
    ) -> None:
        """Run the schedule over the micro-batches; `finish` gets the scores of each on the last stage, where asked for.

        `counting`: whether routers are to count, or to add their loss. `ahead`: how many forward passes run before the
        first backward pass; the others are counted then.
        """
        kept: deque[tuple[MicroBatch, ModelInputs, Tensor]] = deque()

        def forward(micro_batch: MicroBatch, chunk: Any) -> tuple[MicroBatch, ModelInputs, Tensor]:
            inputs = self.builder.inputs(micro_batch)
            packed = self._packed(inputs, counting)
            features = None
            if self.tower is not None and inputs.vision is not None and chunk is self.chunks[0]:
                features = self.tower.features(inputs.vision, inputs.input_ids.numel())
            return micro_batch, inputs, chunk(inputs.input_ids.unsqueeze(0), packed, features)

        def forward_step(iterator: Iterator[MicroBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            if ahead and self.balance is not None and self.balance.counts is None:
                kept.extend(forward(next(iterator), chunk) for _ in range(ahead))
                with torch.no_grad():
                    for one in islice(micro_batches, ahead, None):
                        forward(one, chunk)
                self.balance.counted_all(self.groups.world)
            micro_batch, inputs, output = kept.popleft() if kept else forward(next(iterator), chunk)

            def calculate_loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
                scores = None if scoring is None else self._scores(hidden, micro_batch.packed, inputs, scoring)
                value = finish(micro_batch, scores)
                return value, torch.zeros((), dtype=torch.int, device=value.device), {}

            return output, calculate_loss

        micro_batches = even_rounds(micro_batches, self.groups, len(self.stages))
        iterators = [iter(micro_batches) for _ in self.chunks]
        with adapted(self.device):
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=iterators if len(iterators) > 1 else iterators[0],
                model=self.chunks,
                num_microbatches=len(micro_batches),
                seq_length=1,  # sizes travel with the tensors
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _own_tokens(self, values: Tensor | None) -> Tensor | None:
        """Return the part of [T, ...] that this rank has between layers."""
        if values is None:
            return None
        return values.chunk(self.groups.layout.tp)[self.place.at.tp]

    def _packed(self, inputs: ModelInputs, counting: bool) -> PackedTokens:
        context = inputs.context
        assert context is not None
        cos, sin = angles(self.rotary, inputs.position_ids, self.parameters[0].parameter)
        return PackedTokens(
            qkv_format="thd",
            cu_seqlens_q=context.cu_seqlens,
            cu_seqlens_kv=context.cu_seqlens,
            max_seqlen_q=context.max_seqlen,
            max_seqlen_kv=context.max_seqlen,
            context=context,
            cos=cos,
            sin=sin,
            counted=self._own_tokens(inputs.counted if counting else None),
            experts=self._own_tokens(inputs.experts),
        )

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> Tensor:
        """Clip the gradient, and update by AdamW where the norm is finite."""
        assert self.updates is not None, "the engine refuses to train without an optimizer"
        with adapted(self.device):
            return self.updates.step(lr, loss, adam)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Join one tensor after another from the ranks' parts, with adapters merged into their weights."""
        every = self._whole(self.shapes)
        return every if self.adapters is None else self.adapters.merged(every)

    def shards(self) -> Iterator[LiveShard]:
        """Yield this rank's boxes of every tensor, in place."""
        return live_shards(self._parts())

    def adapter_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Join the adapters from the ranks' parts, one tensor after another."""
        return self._whole({name: shape for name, shape in self.shapes.items() if is_adapter(name)})

    def without_adapters(self) -> AbstractContextManager[None]:
        """Switch the adapters off inside the block: the model is the base alone. ValueError where there are none."""
        if self.adapters is None:
            raise ValueError("the model has no adapters: it is no base of its own")
        return self.adapters.off()

    def _whole(self, shapes: Mapping[str, Shape]) -> Iterator[tuple[str, Tensor]]:
        like = torch.empty(0, dtype=self._stored, device=self.device)
        return whole_tensors(self._parts(), shapes, like)

    def _parts(self) -> list[tuple[Part, Tensor]]:
        """Return the parts that this rank answers for: masters, and frozen parameters."""
        return [*(() if self.updates is None else self.updates.updated()), *self.frozen]

    @property
    def _stored(self) -> torch.dtype:
        """The dtype that weights are exported and saved in: float32 at least where they are trained."""
        dtype: torch.dtype = self.settings.params_dtype
        return dtype if self.updates is None else torch.promote_types(dtype, torch.float32)

    def state(self) -> dict[str, Any]:
        """Return weights and moments by the names of the transformers model, under which FSDP2 saves them too."""
        values = dict(self._parts() if self.updates is None else [*self.updates.updated(), *self._seeing()])
        weights = _scorer_names(boxed(list(values), self.shapes, values.__getitem__))
        if self.updates is None:
            return {"model": weights}
        if self.adapters is not None:  # these alone are saved
            weights[BASE] = self._base().clone()
        return {"model": weights, "optimizer": {"state": _scorer_names(self.updates.state(self.shapes))}}

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the optimizer from its state, which was read in place."""
        del state
        if self.updates is not None:
            taken_over(dict(self._seeing()))
            with adapted(self.device):
                self.updates.take_loaded()

    def _seeing(self) -> list[tuple[Part, Tensor]]:
        """Return the parts of a vision tower that are saved with the weights: adapters are saved alone."""
        return [] if self.adapters is not None else self.seeing

    def _base(self) -> Tensor:
        """Return u8[16], the digest of the adapters' base. It never changes. Collective the first time."""
        if self._digest is None:
            self._digest = frozen_digest(self.frozen, self.shapes, self._dtypes, self.groups.world, self.device)
        return self._digest

    def move(self, device: torch.device) -> None:
        """Free the device's memory: weights, masters and moments move to the host, gradients are dropped."""
        if self.device.type == "cpu":
            return
        if device == self.device:
            self._moved.back()
            return
        memory = self.memory
        self._moved.offload(memory.kept(self.device), memory.gradients)
        devices_of(self.device).release()


def _scorer_names(tensors: dict[str, Any]) -> dict[str, Any]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def _dtype(config: EngineConfig, model: Any, device: torch.device) -> torch.dtype:
    """Return the dtype that the layers compute in: a model that is more exact than float32 keeps its own."""
    own: torch.dtype = next(model.parameters()).dtype
    return own if own == torch.float64 else compute_dtype(config, device)


def _forwards_ahead(config: EngineConfig) -> int:
    """Return how many passes run ahead: all where layers are recomputed, as a pass that counts costs as much there."""
    default = -1 if config.gradient_checkpointing else 0
    return default if config.router_forwards_ahead is None else config.router_forwards_ahead
