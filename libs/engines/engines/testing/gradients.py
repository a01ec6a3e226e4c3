"""Gradients of an engine's step that is not made, and how far they are from others."""

from typing import Any

import torch
from tensordict import TensorDict

from engines.execution.executor import Scoring
from engines.execution.loss import StepLoss


def gradients(built: Any, data: TensorDict, objective: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return (loss, gradients by name) of a step that is not made."""
    work = built._agree_on(data, objective)
    loss = StepLoss(objective, work.stats.totals)
    built.executor.train(built._micro_batches(work.batch, work.plan), loss, Scoring())
    shards = {name: p.grad for name, p in built.executor.scorer.named_parameters() if p.requires_grad}
    whole = {name: (g.full_tensor() if hasattr(g, "full_tensor") else g).double() for name, g in shards.items()}
    return float(loss.share(built.device)), whole


def error(found: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> float:
    """Return the root of squared differences over that of squares."""
    squares = sum(float((found[name] - value).square().sum()) for name, value in exact.items())
    return float((squares / sum(float(value.square().sum()) for value in exact.values())) ** 0.5)
