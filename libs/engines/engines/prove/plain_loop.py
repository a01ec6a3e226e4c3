"""A plain training loop over a stock transformers model in float64, one sequence at a time: what an engine on any
ranks is held to. It shares no code with the engine: torch's AdamW, torch's clipping, adapters as W + scale B A.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from engines.families.router import RouterLoss
from engines.prove.comparison import Result, chosen_log_probs
from engines.prove.float64 import KeepFloat64


class _LowRank(nn.Module):
    """The weight of a layer with its adapter."""

    def __init__(self, scale: float, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.scale, self.lora_A, self.lora_B = scale, nn.Parameter(a), nn.Parameter(b)

    def forward(self, weight: Tensor) -> Tensor:
        """Return W + scale * B A."""
        return weight + self.scale * (self.lora_B @ self.lora_A)


@dataclass(frozen=True)
class Adam:
    """Settings of the loop's updates."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    grad_clip: float | None
    narrow: bool = False
    """Whether weights, gradients and moments are rounded to bfloat16."""


class PlainLoop:
    """A stock model with its trained parameters by name: those that require a gradient, or of the given adapters."""

    def __init__(
        self, model: Any, adapters: Mapping[str, Tensor], scale: float, router: RouterLoss | None, kind: str
    ) -> None:
        """Take a float64 model in evaluation mode. `adapters`: values by LAYER.lora_A and LAYER.lora_B; `router`: the
        losses of modules of class `kind`."""
        self.model = model
        self.router = router
        self.trained: dict[str, nn.Parameter] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if adapters:
            self.trained = {}
            model.requires_grad_(False)
        for name in sorted({name.rpartition(".")[0] for name in adapters}):
            low = _LowRank(scale, *(adapters[f"{name}.{part}"].double() for part in ("lora_A", "lora_B")))
            parametrize.register_parametrization(model.get_submodule(name), "weight", low)
            self.trained |= {f"{name}.lora_A": low.lora_A, f"{name}.lora_B": low.lora_B}
        self.logits: dict[str, list[Tensor]] = {}
        for name, module in model.named_modules() if router is not None else ():
            if type(module).__name__ == kind:
                self.logits[name] = []
                module.register_forward_hook(lambda _m, _i, out, name=name: self.logits[name].append(out[0]))

    def gradients(self, rows: Sequence[Tensor], weights: Tensor) -> tuple[Result, float]:
        """Return log-probs and gradients of their sum by `weights` plus the routers' losses, and that loss."""
        self.model.zero_grad(set_to_none=True)
        for logits in self.logits.values():
            logits.clear()
        with KeepFloat64():
            log_probs = torch.cat([chosen_log_probs(self.model, ids) for ids in rows])
            loss = (log_probs * weights).sum()
            if self.router is not None:
                one = self.router
                loss = loss + router_losses([*self.logits.values()], one.top_k, one.coefficient, one.z_coefficient)
            loss.backward()
        grads = {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in self.trained.items()}
        return Result(log_probs.detach(), grads), float(loss.detach())

    def train(self, rows: Sequence[Tensor], weights: Tensor, settings: Adam, steps: int) -> list[dict[str, float]]:
        """Take steps by torch's AdamW, decay on matrices alone; return loss and gradient norm of each."""
        groups = [
            {"params": [p for p in self.trained.values() if (p.ndim >= 2) == decays], "weight_decay": decay}
            for decays, decay in ((True, settings.weight_decay), (False, 0.0))
        ]
        optimizer = torch.optim.AdamW(
            [group for group in groups if group["params"]], lr=settings.lr, betas=settings.betas, eps=settings.eps
        )
        curve = []
        for _ in range(steps):
            _, loss = self.gradients(rows, weights)
            if settings.narrow:
                _round([p.grad for p in self.trained.values()])
            limit = float("inf") if settings.grad_clip is None else settings.grad_clip
            norm = float(nn.utils.clip_grad_norm_(list(self.trained.values()), limit))
            optimizer.step()
            if settings.narrow:
                moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
                _round([*self.trained.values(), *moments])
            curve.append({"loss": loss, "grad_norm": norm})
        return curve

    @torch.no_grad()
    def merged(self) -> dict[str, Tensor]:
        """Return copies of the weights by the names of the stock model, with adapters added."""
        merged = {}
        for name, parameter in self.model.named_parameters():
            layer, separator, _ = name.partition(".parametrizations.weight.original")
            if separator:
                merged[f"{layer}.weight"] = self.model.get_submodule(layer).weight.clone()
            elif ".parametrizations." not in name:
                merged[name] = parameter.detach().clone()
        return merged


@torch.no_grad()
def _round(tensors: Sequence[Tensor | None]) -> None:
    """Cast tensors in place to what bfloat16 can hold."""
    for tensor in tensors:
        if tensor is not None:
            tensor.copy_(tensor.to(torch.bfloat16))


def router_losses(logits: Sequence[Sequence[Tensor]], top_k: int, coefficient: float, z_coefficient: float) -> Tensor:
    """Return Switch's loss, pooled over layers and tokens, plus ST-MoE's z-loss, a token mean for each layer.

    `logits`: those of each layer, in parts of any shape [..., E].
    """
    layers = [torch.cat([part.reshape(-1, part.shape[-1]) for part in parts]) for parts in logits]
    rows = torch.cat(layers)
    probabilities = rows.exp() / rows.exp().sum(-1, keepdim=True)
    chosen = torch.zeros_like(rows)
    for place, row in enumerate(rows):
        chosen[place, row.topk(top_k).indices] = 1
    balance = rows.shape[-1] * (chosen.mean(0) * probabilities.mean(0)).sum()
    z_loss = torch.stack([layer.exp().sum(-1).log().square().mean() for layer in layers]).sum()
    auxiliary: Tensor = coefficient * balance + z_coefficient * z_loss
    return auxiliary
