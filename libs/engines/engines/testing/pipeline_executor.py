"""An executor with a schedule of its own: two or more pipeline stages, all forwards before any backward (GPipe).

It needs of the `Executor` protocol what Megatron does: micro-batches iterated by every stage, losses on the last one
alone, activations and their gradients between stages, gradients summed over data-parallel ranks of a stage. Plain
autograd, each row alone through the stock layers. A stage's process holds the whole module, but what it does not own is
NaN, so that nothing is computed with it.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.execution.executor import LossFunction, Scores, Scoring, TakeScores
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.execution.optimizer import finite_on_all_ranks
from engines.parallel.groups import ParallelGroups
from engines.private_api import with_own_children

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class PipelineExecutor:
    """See `engines.execution.executor.Executor`; `model` has as many equal parts as `groups.layout.pp` has stages."""

    def __init__(self, config: EngineConfig, groups: ParallelGroups, model: Any) -> None:
        self.config = config
        self.groups = groups
        self.trainable = True
        self.adds_loss = False
        self.compiled: Supported | Unsupported = Unsupported("a test's executor")
        self.updated_by = "torch's AdamW"
        self.device = torch.device("cpu")
        self.model = model.eval()
        self.root = nn.ModuleDict({"model": model})
        self.stages = groups.layout.pipeline_ranks(groups.rank)
        self.stage = self.stages.index(groups.rank)
        layers = model.model.layers
        self.per_stage = len(layers) // len(self.stages)
        self.base = with_own_children(model.model)
        self.base.layers = layers[self.stage * self.per_stage : (self.stage + 1) * self.per_stage]
        if not self._last:
            self.base.norm = nn.Identity()
        self.own = {name: p for name, p in model.named_parameters() if self._owner(name) == self.stage}
        for name, parameter in model.named_parameters():
            if name not in self.own:
                parameter.data.fill_(float("nan"))
        decayed = [p for p in self.own.values() if p.ndim >= 2]
        rest = [p for p in self.own.values() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            betas=config.betas,
            eps=config.eps,
        )

    def ahead(self, micro_batches: MicroBatches) -> MicroBatches:
        """Return the micro-batches unchanged."""
        return micro_batches

    def train(self, micro_batches: MicroBatches, loss: LossFunction, scoring: Scoring, add: bool = False) -> None:
        """Run all forwards, then all backwards in the opposite order."""
        if not add:
            self.optimizer.zero_grad()
        done = []
        for micro_batch in micro_batches:
            received, output = self._forward(micro_batch)
            if self._last:
                output = loss(micro_batch, self._scores(micro_batch, output, scoring))
            done.append((received, output))
        for received, output in reversed(done):
            gradient = None if self._last else torch.empty_like(output)
            if gradient is not None:
                dist.recv(gradient, self.stages[self.stage + 1])
            torch.autograd.backward(output, gradient)
            if received is not None and received.grad is not None:
                dist.send(received.grad, self.stages[self.stage - 1])

    @torch.no_grad()
    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """Run all forwards."""
        for micro_batch in micro_batches:
            output = self._forward(micro_batch)[1]
            if self._last:
                take(micro_batch, self._scores(micro_batch, output, scoring))

    def _forward(self, micro_batch: MicroBatch) -> tuple[Tensor | None, Tensor]:
        """Return (activations f32[T, H] of the stage before, activations of this one, which the next one gets)."""
        packed, received = micro_batch.packed, None
        if self.stage:
            received = torch.empty(packed.num_tokens, self.model.config.hidden_size)
            dist.recv(received, self.stages[self.stage - 1])
            received.requires_grad_(torch.is_grad_enabled())
        rows = []
        for start, end in pairwise(packed.cu_seqlens.tolist()):
            inputs = (
                {"input_ids": packed.values["input_ids"][None, start:end]}
                if received is None
                else {"inputs_embeds": received[None, start:end]}
            )
            rows.append(self.base(**inputs, use_cache=False).last_hidden_state[0])
        output = torch.cat(rows)
        if not self._last:
            dist.send(output.detach(), self.stages[self.stage + 1])
        return received, output

    def _scores(self, micro_batch: MicroBatch, hidden: Tensor, scoring: Scoring) -> Scores:
        logits = self.model.lm_head(hidden).float() / scoring.temperature
        table = torch.log_softmax(logits, dim=-1)
        ids = micro_batch.packed.values["input_ids"]
        wanted = micro_batch.wanted
        log_probs = torch.where(wanted, table.roll(1, 0).gather(1, ids[:, None]).squeeze(1), 0.0)
        entropy = torch.where(wanted, -(table.exp() * table).sum(-1).roll(1), 0.0)
        return Scores(log_probs, entropy if scoring.entropy else None)

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> Tensor:
        """Sum gradients over ranks, and clip by the norm over all stages."""
        for parameter in self.own.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.groups.plan)
        if not finite_on_all_ranks(loss, self.groups.world):
            return torch.tensor(torch.nan)
        square = sum((p.grad.double().square().sum() for p in self.own.values()), torch.zeros((), dtype=torch.float64))
        dist.all_reduce(square, group=self.groups.pipeline)
        norm = float(square.sqrt())
        limit = adam.grad_clip
        if limit is not None and limit < norm < float("inf"):
            for parameter in self.own.values():
                parameter.grad.mul_(limit / norm)
        if norm < float("inf"):
            for group in self.optimizer.param_groups:
                group |= {"lr": lr, "betas": adam.betas, "eps": adam.eps}
            self.optimizer.step()
        return torch.tensor(norm)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Send each parameter from the stage that owns it to the others."""
        for name, parameter in self.model.named_parameters():
            whole = parameter.detach().clone()
            dist.broadcast(whole, self.stages[self._owner(name)], group=self.groups.pipeline)
            yield name, whole

    def state(self) -> dict[str, Any]:
        """Return the parameters and states that this stage owns."""
        return {
            "model": {f"model.{name}": p.detach() for name, p in self.own.items()},
            "optimizer": get_optimizer_state_dict(self.root, self.optimizer, options=_FLAT),
        }

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the optimizer's states."""
        set_optimizer_state_dict(self.root, self.optimizer, state["optimizer"], options=_FLAT)

    def move(self, device: torch.device) -> None:
        """Do nothing: everything stays on the CPU."""

    @property
    def _last(self) -> bool:
        return self.stage == len(self.stages) - 1

    def _owner(self, name: str) -> int:
        if ".layers." in name:
            return int(name.split(".layers.")[1].split(".")[0]) // self.per_stage
        return 0 if "embed_tokens" in name else len(self.stages) - 1
