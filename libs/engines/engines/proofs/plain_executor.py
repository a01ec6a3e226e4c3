"""An executor without FSDP, packing or shared code: each row alone through the stock model, torch's AdamW, all-reduce.

The oracle of the others: `build_plain_engine` puts it under the same `Engine`.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.execution.executor import LossFunction, Scores, Scoring, Several, TakeScores
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.execution.optimizer import finite_on_all_ranks
from engines.families.registry import family_of
from engines.families.torch_operations import choose_torch_operations
from engines.launch import ensure_group
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.step import Engine
from engines.weights.model_weights import ModelWeights, live_tensors


def build_plain_engine(config: EngineConfig, model: Any, trainable: bool = True) -> Engine:
    """Build an engine over all ranks, which hold a whole copy of `model` each."""
    ensure_group(config.device)
    groups = ParallelGroups.make(ParallelLayout(dp=dist.get_world_size()))
    planner = DataParallelPlanner(config.max_tokens_per_rank, groups.layout.plan_size)
    weights = ModelWeights.of(family_of(model.config), model)
    return Engine(config, PlainExecutor(config, groups, model, trainable), planner, weights)


class PlainExecutor:
    """See `engines.execution.executor.Executor`."""

    adds_loss = False
    compiled: Supported | Unsupported = Unsupported("the plain executor calls stock transformers")
    updated_by = "torch's AdamW"

    def __init__(self, config: EngineConfig, groups: ParallelGroups, model: Any, trainable: bool = True) -> None:
        wanted = config.router_aux_loss_coef, config.router_z_loss_coef
        if not self.adds_loss and family_of(model.config).auxiliary_loss(model.config, *wanted) is not None:
            raise ValueError("the plain executor has no router's loss: set output_router_logits=False in the config")
        self.config = config
        self.groups = groups
        self.trainable = trainable
        choose_torch_operations(model)
        self.model = model.eval().requires_grad_(trainable)
        self.device = next(model.parameters()).device
        self.root = nn.ModuleDict({"model": model})  # so that checkpoints have the names of the other executors
        self.parameters = list(model.parameters())
        decayed = [p for p in self.parameters if p.ndim >= 2]
        rest = [p for p in self.parameters if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": rest, "weight_decay": 0.0}],
            betas=config.betas,
            eps=config.eps,
        )

    def ahead(self, micro_batches: MicroBatches) -> MicroBatches:
        """Return the micro-batches unchanged."""
        return micro_batches

    def train(self, micro_batches: MicroBatches, loss: LossFunction, scoring: Scoring, add: bool = False) -> None:
        """Compute gradients row by row."""
        if not add:
            self.optimizer.zero_grad()
        for micro_batch in micro_batches:
            loss(micro_batch, self._scores(micro_batch, scoring)).backward()

    @torch.no_grad()
    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> None:
        """Score row by row."""
        for micro_batch in micro_batches:
            take(micro_batch, self._scores(micro_batch, scoring))

    def _scores(self, micro_batch: MicroBatch, scoring: Scoring) -> Scores:
        log_probs, entropies, several = [], [], []
        packed = micro_batch.packed
        for start, end in pairwise(packed.cu_seqlens.tolist()):
            ids = packed.values["input_ids"][start:end]
            logits = self.model(input_ids=ids[None], use_cache=False).logits[0].float() / scoring.temperature
            table = torch.log_softmax(logits, dim=-1)
            first = 0 * logits[:1, 0]
            log_probs += [first, table[:-1].gather(1, ids[1:, None]).squeeze(1)]
            entropies += [first, -(table.exp() * table).sum(-1)[:-1]]
            before = torch.cat([table[:1], table[:-1]])  # nothing reads what a first token has
            if scoring.tokens is not None:
                several.append(_of_several(before, packed.values[scoring.tokens][:, start:end].t()))
            elif scoring.top_k:
                several.append(_of_several(before, before.topk(scoring.top_k).indices))
        scores = [torch.where(micro_batch.wanted, torch.cat(rows), 0.0) for rows in (log_probs, entropies)]
        asked = Several(*map(torch.cat, zip(*several, strict=True))) if several else None
        return Scores(scores[0], scores[1] if scoring.entropy else None, several=asked)

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> Tensor:
        """Sum the gradients of all ranks, clip and update with torch's own functions."""
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self.groups.plan)
        if not finite_on_all_ranks(loss, self.groups.world):
            return torch.tensor(torch.nan)
        limit = float("inf") if adam.grad_clip is None else adam.grad_clip
        norm = float(nn.utils.clip_grad_norm_(self.parameters, limit))
        if norm < float("inf"):
            for group in self.optimizer.param_groups:
                group |= {"lr": lr, "betas": adam.betas, "eps": adam.eps}
                group["weight_decay"] = adam.weight_decay * (group["params"][0].ndim >= 2)
            self.optimizer.step()
        return torch.tensor(norm)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield parameters and persistent buffers as they are."""
        yield from live_tensors(self.model).items()

    def state(self) -> dict[str, Any]:
        """Return the parameters and the optimizer's states."""
        state: dict[str, Any] = {"model": {name: p.detach() for name, p in self.root.named_parameters()}}
        if self.trainable:
            state["optimizer"] = get_optimizer_state_dict(self.root, self.optimizer)
        return state

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the optimizer's states."""
        if self.trainable:
            set_optimizer_state_dict(self.root, self.optimizer, state["optimizer"])

    def move(self, device: torch.device) -> None:
        """Move the parameters; moments stay."""
        self.model.to(device)


def _of_several(table: Tensor, tokens: Tensor) -> Several:
    """Return the scores of tokens i64[N, K] (-1: none) by log-probs [N, V] of the whole vocabulary."""
    there = tokens >= 0
    taken = (torch.nn.functional.one_hot(tokens.clamp(min=0), table.shape[1]) * there[..., None]).sum(1).bool()
    chosen = table.gather(1, tokens.clamp(min=0)).masked_fill(~there, 0)
    return Several(tokens, chosen, table.masked_fill(taken, -torch.inf).logsumexp(-1))
