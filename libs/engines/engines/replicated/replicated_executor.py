"""The executor of weights that every rank holds whole, with exact values and moments sharded over the ranks.

It differs from the FSDP2 executor (whose loop, scores and router loss it has) in where weights live: no gathering and
no hooks in forward and backward passes, so that nothing slows a compiled layer down on the host; two bytes a parameter
of memory on every rank instead of a share of four (ZeRO stage 1 and 2, Rajbhandari et al., arXiv 1910.02054, over
weights in two parts). Clipping and skipping are inside the update, which the host does not wait for.
"""

from collections.abc import Iterator
from typing import Any, SupportsFloat

import torch
import torch.distributed as dist
from torch import Tensor

from engines.config import EngineConfig
from engines.devices.detect import devices_of
from engines.execution.early_host_read import EarlyRead
from engines.execution.executor import LossFunction, Scoring
from engines.execution.memory import StateTensors
from engines.execution.micro_batches import MicroBatches
from engines.families.registry import family_of
from engines.families.router import RouterCounts
from engines.fast.adamw import AdamW, control
from engines.fsdp2.fsdp2_executor import FSDP2Executor
from engines.fsdp2.host_offload import move_all
from engines.loading import cast_parameters, compute_dtype
from engines.parallel.groups import mesh_of, second_world
from engines.private_api import foreach_norm
from engines.replicated.bucket_exchange import Exchange
from engines.replicated.fp32_masters import ExactRows, Master, optimizer_state
from engines.weights.box import Box
from engines.weights.disk_weights import DiskWeights
from engines.weights.empty_model import allocate
from engines.weights.model_weights import live_tensors
from engines.weights.shard_export import LiveShard, rows_held
from seqpack.memory import ledger


class ReplicatedExecutor(FSDP2Executor):
    """See `engines.execution.executor.Executor` and the module's text."""

    def _shard(self, disk: DiskWeights | None) -> None:
        self.mesh = mesh_of(self.device.type, (dist.get_world_size(),))
        dtype = compute_dtype(self.config, self.device)
        if disk is not None:
            allocate(cast_parameters(self.model, dtype), self.device)
            disk.fill_buffers(self.model)
        self.masters = [
            Master.of(name, parameter, dtype, self.mesh, self.trainable, disk, self.scales.get(name, 1.0))
            for name, parameter in self.scorer.named_parameters()
        ]
        self.updates = torch.zeros((), dtype=torch.float64, device=self.device)
        self._begin_exchange()

    def _begin_exchange(self) -> None:
        """Sort parameters into buckets as a backward pass fills them: the head, layers from the last to the first, then
        the embedding (with a head that is tied to it) and a tower. A forward pass waits for weights when it reaches
        them."""
        family = family_of(self.model.config)
        layers, begins = family.layers(self.model), [self.model.get_input_embeddings(), family.tower(self.model)]
        early = {parameter for module in begins if module is not None for parameter in module.parameters()}
        left = {one.parameter: one for one in self.masters}
        inner = [[left.pop(parameter) for parameter in layer.parameters()] for layer in layers]
        last, first = (
            [one for parameter, one in left.items() if (parameter in early) == is_early] for is_early in (0, 1)
        )
        group = self.mesh.get_group() if dist.get_world_size() == 1 else second_world()
        self.exchange = Exchange([last, *reversed(inner), first], group)
        if self.exchange.alone:
            return
        buckets = {id(one): bucket for bucket in self.exchange.buckets for one in bucket.masters}
        for module, masters in [
            *((module, first) for module in (self.scorer, *begins)),
            *zip(layers, inner, strict=True),
        ]:
            if module is not None and masters:
                bucket = buckets[id(masters[0])]
                module.register_forward_pre_hook(lambda *_, bucket=bucket: bucket.settle())
        if last:
            bucket = buckets[id(last[0])]
            layers[-1].register_forward_hook(lambda *_, bucket=bucket: bucket.settle())

    @property
    def updated_by(self) -> str:
        """See `Executor`."""
        return "the fused AdamW of replicated weights" if self.trainable else super().updated_by

    @property
    def memory(self) -> StateTensors:
        """See `StateTensors`. Float32 values and moments of this rank's rows are its optimizer states."""
        weights = [*self.scorer.parameters(), *self.scorer.buffers()]
        sums = [total for bucket in self.exchange.buckets for total in bucket.sums or ()]
        beside = [tensor for one in self.masters for tensor in one.beside()]
        return StateTensors(
            weights, [*(one.grad for one in weights if one.grad is not None), *sums], beside, self._host.blocks
        )

    def _build_optimizer(self) -> None:
        """Build none: the masters have the moments."""
        return

    def train(
        self,
        micro_batches: MicroBatches,
        loss: LossFunction,
        scoring: Scoring,
        add: bool = False,
        counts: RouterCounts | None = None,
    ) -> None:
        """See `Executor`."""
        self.exchange.begin(len(micro_batches), add)
        for micro_batch, scores in self._scored(micro_batches, scoring, counts):
            loss(micro_batch, scores).backward()
            del scores
            self.exchange.end_micro_batch()

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> SupportsFloat:
        """Clip and update; see `Executor`. Nothing here waits for the device."""
        gradients = self.exchange.gradients()
        ledger.observe(self, ledger.GRADIENTS)
        norm = self._norm([grad for bucket in gradients for grad in bucket], loss)
        known = EarlyRead(norm)
        controls = control(norm, adam.grad_clip, self.updates + 1, adam.betas)
        self.updates += norm.isfinite()
        settings = {scale: AdamW(lr * scale, adam.betas, adam.eps) for scale in {1.0, *self.scales.values()}}
        self.exchange.settle()  # nothing is on its way, unless nobody computed with it
        # The embedding, whose gradient came last, goes first: it is the largest, and the next step begins with it.
        for bucket, grads in reversed(list(zip(self.exchange.buckets, gradients, strict=True))):
            for one, grad in zip(bucket.masters, grads, strict=True):
                one.update(grad, controls, settings[one.scale], adam.weight_decay)
            if not self.exchange.alone:
                bucket.gather()
        self.exchange.forget()
        return known

    def _norm(self, grads: list[Tensor], loss: Tensor) -> Tensor:
        """Return the global norm, f64[]; NaN on every rank where the loss of one is not finite."""
        filled = [grad for grad in grads if grad.numel()]
        squares = 0.0 * loss.detach().double()
        if filled:
            norms = torch.stack(foreach_norm(filled, dtype=torch.float32))
            squares = squares + norms.double().square().sum()
        if not self.exchange.alone:
            dist.all_reduce(squares, group=self.groups.world)
        return squares.sqrt()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Gather one tensor after another, in float32."""
        self.exchange.settle()
        by_parameter: dict[Tensor, Master] = {one.parameter: one for one in self.masters}
        for name, tensor in live_tensors(self.model).items():
            one = by_parameter.get(tensor)
            yield name, tensor if one is None else one.spread(one.exact(), self.mesh).full_tensor()

    def shards(self) -> Iterator[LiveShard]:
        """Yield this rank's rows of every tensor, exact in float32; buffers whole."""
        self.exchange.settle()
        by_parameter: dict[Tensor, Master] = {one.parameter: one for one in self.masters}
        for name, tensor in live_tensors(self.model).items():
            one = by_parameter.get(tensor)
            if one is None:
                whole = rows_held(name, tensor)
                assert whole is not None, "a buffer is whole on every rank"
                yield whole
            elif one.rows.stop > one.rows.start:
                start = (one.rows.start, *(0 for _ in tensor.shape[1:]))
                size = (one.rows.stop - one.rows.start, *tensor.shape[1:])
                yield LiveShard(name, Box(start, size), ExactRows(one))

    def held(self) -> dict[str, Tensor]:
        """Return the weights of the compute dtype, whole, once every gather is done."""
        self.exchange.settle()
        return super().held()

    def state(self) -> dict[str, Any]:
        """Return shards in float32, as the FSDP2 executor does; `load_state` takes over what is read into them."""
        self.exchange.settle()
        saved = self.scorer.state_dict()
        tensors = {one.name: one.spread(one.exact(), self.mesh) for one in self.masters} | {
            name: value.detach() for name, value in self.scorer.named_buffers() if name in saved
        }
        state: dict[str, Any] = {"model": tensors}
        if self.trainable:
            state["optimizer"] = optimizer_state(self.masters, self.config, self.mesh, self.updates)
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Any]) -> None:
        """Take over weights and moments that were read, and their number of updates."""
        self.exchange.settle()
        for one in self.masters:
            one.set_exact(state["model"][one.name].to_local())
        for bucket in () if self.exchange.alone else self.exchange.buckets:
            bucket.gather()
        self.exchange.settle()
        if self.trainable:
            states = state["optimizer"]["state"]
            self.updates.copy_(states[self.masters[0].name]["step"])
            for one in self.masters:
                first, second = (states[one.name][key].to_local() for key in ("exp_avg", "exp_avg_sq"))
                one.moments = first, second

    def move(self, device: torch.device) -> None:
        """Move weights, rests and moments."""
        self.exchange.settle()
        take = move_all(self.scorer, (tensor for one in self.masters for tensor in one.beside()), device, self._host)
        for one in self.masters:
            one.move(take)
        devices_of(self.device).release()
