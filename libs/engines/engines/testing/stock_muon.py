"""Steps of stock transformers with `torch.optim.Muon`: the outside truth of `engines.muon`."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from engines.config import EngineConfig
from engines.families.registry import family_of
from engines.loading import cast_parameters
from engines.muon import zeropower
from engines.parallel.groups import ParallelGroups
from engines.parallel.layout import ParallelLayout
from engines.parallel.planning import DataParallelPlanner
from engines.private_api import set_experts
from engines.proofs.float64 import KeepFloat64
from engines.proofs.plain_executor import PlainExecutor
from engines.step import Engine
from engines.weights.model_weights import ModelWeights
from seqpack.batches.objective import Objective


class _Float64Iterations(KeepFloat64):
    """The mode in which torch's iterations, too, keep float64."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a function of torch, with float64 in place of bfloat16 and float32."""
        if func is Tensor.bfloat16:
            return args[0].clone()  # torch divides it in place
        return super().__torch_function__(func, types, args, kwargs)


@contextmanager
def float64_muon() -> Iterator[None]:
    """Compute Newton-Schulz iterations in float64 too: torch's, and ours.

    A router's gradient has a direction of no length at all, as its softmax does not see what all experts share. The
    iterations turn the rounding of bfloat16 there into a step of full size, so two right programs differ by it.
    """
    zeropower.DTYPE = torch.float64
    try:
        with _Float64Iterations():
            yield
    finally:
        zeropower.DTYPE = torch.bfloat16


class StockMuon:
    """torch's Muon and AdamW by turns; an expert of stacked ones is a parameter of its own."""

    def __init__(self, model: nn.Module, config: EngineConfig) -> None:
        matrices = [p for name, p in model.named_parameters() if by_muon(name, p)]
        rest = [p for name, p in model.named_parameters() if not by_muon(name, p)]
        self.slices = [(nn.Parameter(one), p, n) for p in matrices if p.ndim == 3 for n, one in enumerate(p.detach())]
        own = [p for p in matrices if p.ndim == 2] + [one for one, _, _ in self.slices]
        muon: Any = torch.optim.Muon
        self.both = (
            torch.optim.AdamW(
                [{"params": [p for p in rest if (p.ndim < 2) == vector], "decays": not vector} for vector in (0, 1)],
                betas=config.betas,
                eps=config.eps,
            ),
            muon([{"params": own, "decays": True}], momentum=config.muon_momentum, adjust_lr_fn="match_rms_adamw"),
        )
        self.param_groups = [group for one in self.both for group in one.param_groups]

    def step(self) -> None:
        """Step both."""
        for one, whole, number in self.slices:
            assert whole.grad is not None
            one.grad = whole.grad[number]
        for optimizer in self.both:
            optimizer.step()

    def zero_grad(self) -> None:
        """Forget gradients."""
        for optimizer in self.both:
            optimizer.zero_grad()
        for _, whole, _ in self.slices:
            whole.grad = None


def by_muon(name: str, parameter: Tensor) -> bool:
    """Return whether Muon updates a parameter, as its name says."""
    words = ("proj", "mlp.gate.weight")
    return ".layers." in name and any(word in name for word in words) and min(parameter.shape) > 1


class StockMuonExecutor(PlainExecutor):
    """`PlainExecutor` with these optimizers."""

    def __init__(self, config: EngineConfig, groups: ParallelGroups, model: Any, trainable: bool = True) -> None:
        super().__init__(config, groups, model, trainable)
        self.muon = StockMuon(model, config)

    def optimizer_step(self, lr: float, loss: Tensor, adam: EngineConfig) -> Tensor:
        """Clip and update."""
        del loss
        limit = float("inf") if adam.grad_clip is None else adam.grad_clip
        for parameter in self.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        norm = nn.utils.clip_grad_norm_(self.parameters, limit)
        for group in self.muon.param_groups:
            group |= {"lr": lr, "weight_decay": adam.weight_decay * group["decays"]}
        self.muon.step()
        self.muon.zero_grad()
        return norm


def stock_muon_steps(
    config: EngineConfig, model: Any, batches: Sequence[TensorDict], objective: Objective
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return the metrics of steps in float64, and the weights after them, by a process alone."""
    module: Any = cast_parameters(model, torch.float64)
    set_experts(module.config, "eager")  # transformers' default has no float64
    weights = ModelWeights.of(family_of(module.config), module)
    groups = ParallelGroups.make(ParallelLayout())
    alone = replace(config, backend="fsdp2")
    with float64_muon():
        executor: Any = StockMuonExecutor(alone, groups, module)
        engine = Engine(alone, executor, DataParallelPlanner(config.max_tokens_per_rank, 1), weights)
        curve = [engine.train_batch(batch, objective) for batch in batches]
        return curve, {piece.name: piece.flat.clone() for piece in engine.export_weights(max_bytes=2**40)}
