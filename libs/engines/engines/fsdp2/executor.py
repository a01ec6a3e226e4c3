"""The FSDP2 executor: every layer sharded over all ranks, micro-batches one after another."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from engines.config import EngineConfig
from engines.execution.executor import LossFunction, Scores, Scoring, TakeScores
from engines.execution.inputs import InputBuilder, ModelInputs
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.execution.optimizer import build_optimizer, clip_gradients
from engines.families.registry import family_of
from engines.families.router import RouterCounts, RouterLoss, Routing
from engines.loading import compute_dtype
from engines.packing.model import adapt_for_packing
from engines.parallel.groups import ParallelGroups
from engines.scorer import ModelScores, TokenScorer
from engines.weights.model_weights import live_tensors


class FSDP2Executor:
    """See `engines.execution.executor.Executor`.

    The model stays in evaluation mode while it trains too: dropout is never applied, so that the policy that is trained
    is the one that was scored (the ratio of a first update is 1) and packed rows equal padded ones. Only layers that
    are to be recomputed are in training mode themselves, which is how transformers is told.
    """

    def __init__(
        self, config: EngineConfig, groups: ParallelGroups, model: Any, inputs: InputBuilder, trainable: bool = True
    ) -> None:
        """Shard `model` (a transformers causal LM on `device`), which becomes the executor's."""
        self.config = config
        self.groups = groups
        self.builder = inputs
        self.trainable = trainable
        self.model: Any = model
        self.device = next(model.parameters()).device
        if config.batching == "packed":
            adapt_for_packing(model)
        model.eval()
        if config.gradient_checkpointing:
            _recompute_layers(model)
        model.requires_grad_(trainable)
        self.scorer: Any = TokenScorer(model, config.logit_chunk)
        self.scorer.training = False
        self.router: RouterLoss | None = self.scorer.router
        self.adds_loss = self.router is not None
        self._shard()
        self.optimizer = build_optimizer(self.scorer, config) if trainable else None

    def _shard(self) -> None:
        mesh = init_device_mesh(self.device.type, (dist.get_world_size(),))
        dtype = compute_dtype(self.config, self.device)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        options: dict[str, Any] = {"mesh": mesh, "mp_policy": policy}
        for layer in family_of(self.model.config).layers(self.model):
            fully_shard(layer, reshard_after_forward=self.config.reshard_after_forward, **options)
        fully_shard(self.scorer, reshard_after_forward=False, **options)
        for module in self.scorer.modules():
            if isinstance(module, FSDPModule):
                # The loss is divided by global counts already: gradients are summed over ranks, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)

    def train(self, micro_batches: MicroBatches, loss: LossFunction, scoring: Scoring) -> None:
        """Run forward and backward of one micro-batch after another.

        A router's loss needs the counts of the whole step first (`engines.families.router`): they are taken in a pass
        of their own, without gradients, unless the only micro-batch of a rank gives them on its way.
        """
        self._optimizer.zero_grad(set_to_none=True)
        counts = self._counts(micro_batches) if self.router is not None and len(micro_batches) > 1 else None
        for micro_batch in micro_batches:
            loss(micro_batch, self._scores(micro_batch, scoring, self.router, counts)).backward()

    @torch.no_grad()
    def _counts(self, micro_batches: MicroBatches) -> RouterCounts:
        """Forward passes of all micro-batches, for what the router chooses in them."""
        found = []
        for micro_batch in micro_batches:
            inputs = self.builder.inputs(micro_batch)
            routing = self.scorer(inputs, 1.0, False, routing=True).routing
            found.append(self._own_counts(routing, micro_batch, inputs))
        return self._summed(torch.stack(found).sum(0))

    def _own_counts(self, routing: Routing, micro_batch: MicroBatch, inputs: ModelInputs) -> Tensor:
        """f32[E + 1]: how often each expert was chosen, and rows; ranks that share a micro-batch take shares of it."""
        counts = torch.cat([routing.chosen, routing.rows[None]])
        return self.builder.total(counts, inputs) * micro_batch.loss_weight

    def _summed(self, counts: Tensor) -> RouterCounts:
        dist.all_reduce(counts, group=self.groups.plan)
        return RouterCounts(counts[:-1], counts[-1])

    @torch.no_grad()
    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """Run forward of one micro-batch after another."""
        for micro_batch in micro_batches:
            take(micro_batch, self._scores(micro_batch, scoring))
        self.scorer.reshard()  # without a backward pass the outermost weights would stay gathered

    def _scores(
        self,
        micro_batch: MicroBatch,
        scoring: Scoring,
        router: RouterLoss | None = None,
        counts: RouterCounts | None = None,
    ) -> Scores:
        inputs = self.builder.inputs(micro_batch)
        found: ModelScores = self.scorer(inputs, scoring.temperature, scoring.entropy, routing=router is not None)
        auxiliary = None
        if router is not None and found.routing is not None:
            counts = counts or self._summed(self._own_counts(found.routing, micro_batch, inputs))
            auxiliary = router.loss(self.builder.total(found.routing.probability, inputs), counts)
        return Scores(
            self.builder.collect(found.log_probs, inputs),
            None if found.entropy is None else self.builder.collect(found.entropy, inputs),
            auxiliary,
        )

    def optimizer_step(self, lr: float) -> float:
        """Clip, and let AdamW update where the norm is finite."""
        norm = clip_gradients(self.scorer, self.config.grad_clip, self.groups.world)
        if norm < float("inf"):
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather one tensor after another."""
        for name, tensor in live_tensors(self.model).items():
            yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor

    def state(self) -> dict[str, Any]:
        """Return live shards by name (tied weights once); loading writes into them."""
        saved = self.scorer.state_dict()
        tensors = dict(self.scorer.named_parameters()) | {
            name: value for name, value in self.scorer.named_buffers() if name in saved
        }
        state: dict[str, Any] = {"model": {name: tensor.detach() for name, tensor in tensors.items()}}
        if self.optimizer is not None:
            state["optimizer"] = get_optimizer_state_dict(self.scorer, self.optimizer)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Hand the optimizer its states; the weights were read in place."""
        if self.optimizer is not None:
            set_optimizer_state_dict(self.scorer, self.optimizer, state["optimizer"])

    def move(self, device: torch.device) -> None:
        """Move weights and the optimizer's moments."""
        self.scorer.to(device)
        for state in self.optimizer.state.values() if self.optimizer is not None else ():
            for key, value in state.items():
                if isinstance(value, Tensor) and value.ndim:
                    state[key] = value.to(device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        assert self.optimizer is not None, "the engine refuses to train without an optimizer"
        return self.optimizer


def _recompute_layers(model: Any) -> None:
    """Switch gradient checkpointing on, under the name this transformers release has for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
    for layer in family_of(model.config).layers(model):
        layer.training = True  # the layer alone: what is inside of it stays in evaluation mode
