"""The protocol of an executor: what runs micro-batches and owns weights, gradients and optimizer, on one backend."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, SupportsFloat

import torch
from torch import Tensor, nn

from engines.capability import Supported, Unsupported
from engines.config import EngineConfig
from engines.execution.micro_batches import MicroBatch, MicroBatches
from engines.families.router import RouterCounts
from engines.parallel.groups import ParallelGroups
from seqpack.batches.packed import PackedBatch


@dataclass(frozen=True)
class Scoring:
    """The scores of a micro-batch that are asked for: those of softmax(logits / temperature), with or without
    entropies, and of several tokens at each: those of the key `tokens`, i64 (B, K, j), or the `top_k` likeliest."""

    temperature: float = 1.0
    entropy: bool = False
    tokens: str | None = None
    top_k: int = 0
    mtp: bool = False
    """Whether the head for multi-token prediction scores too."""

    def several(self, packed: PackedBatch, slots: Tensor) -> Tensor | int:
        """Return which tokens are asked for at these tokens of a micro-batch, i64[N, K], or how many likeliest."""
        return self.top_k if self.tokens is None else packed.values[self.tokens][:, slots].t()


class Several(NamedTuple):
    """K distinct tokens at each of N places, i64[N, K] (-1: none), their log-probs f32[N, K] (0 where there is none),
    and f32[N], the log-prob of all other tokens together (-inf where there are none)."""

    tokens: Tensor
    log_probs: Tensor
    rest: Tensor


class MTPScores(NamedTuple):
    """The scores of a head for multi-token prediction, f32[N]: log-probs of tokens, and 1 where the token is the one
    that it finds likeliest; both are 0 of tokens without two before them."""

    log_probs: Tensor
    hits: Tensor


@dataclass(frozen=True)
class Scores:
    """Scores of the T tokens of a micro-batch, whole on every rank that shares it.

    `log_probs`, `entropy` f32[T]: right where `MicroBatch.wanted`, 0 elsewhere. `auxiliary`: a scalar that the model
    adds to the loss by itself (a router's balancing loss), this micro-batch's share of the step. `load` f32[layers, E]:
    how many of the tokens that this rank computed went to each expert. `several`: of K tokens at each, where asked for.
    `mtp`: those of the head for multi-token prediction, f32[T] each, where it is trained.
    """

    log_probs: Tensor
    entropy: Tensor | None = None
    auxiliary: Tensor | None = None
    load: Tensor | None = None
    several: Several | None = None
    mtp: MTPScores | None = None


def collected(
    collect: Callable[[Tensor], Tensor], log_probs: Tensor, entropy: Tensor | None, several: Several | None
) -> Scores:
    """Return the scores of a micro-batch's tokens from those that a rank computed; see `InputBuilder.collect`."""
    return Scores(
        collect(log_probs),
        None if entropy is None else collect(entropy),
        several=None if several is None else Several(*map(collect, several)),
    )


LossFunction = Callable[[MicroBatch, Scores], Tensor]
"""A function to a micro-batch's share of the loss, a scalar: summed over micro-batches and ranks it is the loss of the
step. It is divided by global counts already, so executors sum gradients and never average them."""
TakeScores = Callable[[MicroBatch, Scores], None]


class Executor(Protocol):
    """The interface that runs all micro-batches of a step under a schedule of its own, and makes the optimizer step.

    All methods are collective over `groups.world`. The executor decides when forward and backward of which micro-batch
    run: one after another in a loop (FSDP2), or interleaved in a pipeline. `loss` and `take` are called once a
    micro-batch, in any order, on the ranks of the last stage; all ranks that share a micro-batch call them with equal
    scores, and ranks of one tensor-parallel group do so too. Dummies are run and given to `loss` like the others.

    Megatron implements it over `forward_backward_func(forward_step_func, data_iterator=iter(micro_batches) (a list of
    them for virtual stages), num_microbatches=len(micro_batches), seq_length=1, micro_batch_size=1)`. `forward_step`
    takes the next micro-batch, calls the model with its packed parameters and returns the output with a function that
    makes the scores and returns `(loss(micro_batch, scores), count, report)`; with `calculate_per_token_loss=True` and
    `finalize_model_grads_func` bound to `num_tokens=None` nothing divides the gradients again. `score` is the same call
    with `forward_only=True`. `optimizer_step` sets the rate of its parameter groups and returns the norm of
    `optimizer.step()`, whose found-inf flag becomes a norm that is not finite; `tensors` gathers shards and maps names;
    `state` is `sharded_state_dict` of model and optimizer.
    """

    groups: ParallelGroups
    device: torch.device
    model: nn.Module
    """The transformers module of the run, for its configuration and the names of its tensors."""
    trainable: bool
    adds_loss: bool
    """Whether the model adds a loss of its own (`Scores.auxiliary`), to which every row matters."""
    compiled: Supported | Unsupported
    """Whether layers and head run as compiled functions, or why not."""

    @property
    def updated_by(self) -> str:
        """The name of what updates the weights, and where there is a choice, the reason; for logs."""
        ...

    def ahead(self, micro_batches: MicroBatches) -> MicroBatches:
        """Return the micro-batches of a later step, prepared in the background where that helps."""
        ...

    def train(self, micro_batches: MicroBatches, loss: LossFunction, scoring: Scoring, add: bool = False) -> None:
        """Compute the gradient, summed over micro-batches and ranks; it is added to an earlier one, or replaces it.

        An executor whose `score` returns counts takes them by the name `counts`.
        """
        ...

    def score(self, micro_batches: MicroBatches, take: TakeScores, scoring: Scoring) -> RouterCounts | None:
        """Score every micro-batch without gradients; return what its routers chose, where training will ask for it."""
        ...

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> SupportsFloat:
        """Clip the gradient, update at this rate, and return the norm before clipping; the host waits when it reads it.

        `adam` says betas, eps, decay and clipping. `loss` is this rank's share of the step's, a scalar. Where the loss
        of any rank or the norm is not finite, all ranks return a norm that is not finite, and weights and optimizer
        stay as they were. Best without waiting for the device: the host has the next step to prepare.
        """
        ...

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter (tied ones once) and persistent buffer, whole, under its live name, one at a time."""
        ...

    def state(self) -> dict[str, Any]:
        """Return live (sharded) tensors of model and optimizer, nested as torch's distributed checkpoint takes them.

        The key "model" holds tensors by name.
        """
        ...

    def load_state(self, state: dict[str, Any]) -> None:
        """Take over a `state()` whose tensors were read in place."""
        ...

    def move(self, device: torch.device) -> None:
        """Move weights and optimizer states."""
        ...
