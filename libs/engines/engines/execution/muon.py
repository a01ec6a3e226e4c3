"""Muon (Jordan et al. 2024) for matrices and AdamW for the rest, as one optimizer over shards.

A step of a matrix W with gradient G and momentum M, as `torch.optim.Muon` with `adjust_lr_fn="match_rms_adamw"`:

1. M moves to G: M = mu M + (1 - mu) G. Each rank has the part of M that goes with its part of W.
2. What is orthogonalized is the whole matrix of mu M + (1 - mu) G, on one rank (`engines.muon.exchange`).
3. W = (1 - lr decay) W - lr 0.2 sqrt(max(rows, columns)) times the result.

Matrices are those of the transformers model, whatever a backend joins or cuts: of stacked experts each on its own.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from engines.execution.bfloat16_adamw import BFloat16AdamW
from engines.execution.host_adamw import HostAdamW, on_host
from engines.muon.exchange import Exchange
from engines.muon.exchange_plan import Pair, Piece
from engines.muon.zeropower import rate_ratio
from engines.weights.box import Box

MUON = "muon"
"""Key of an optimizer's group that Muon updates."""
MOMENTUM = "momentum_buffer"
"""Name of a matrix's state, as `torch.optim.Muon` has it."""
MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's."""

Boxes = Callable[[Tensor], Sequence[tuple[str, Box, Tensor]]]
"""A function from a tensor that lies as a parameter does to the boxes in it: (transformers tensor, where, values)."""


@dataclass(frozen=True, eq=False)
class Held:
    """What a parameter holds of matrices; `owned`: whether this rank is the one that owns these values."""

    boxes: Boxes
    owned: bool

    def pieces(self, parameter: Tensor) -> list[Piece]:
        """Return its pieces, in the order of `views`."""
        out = []
        for name, box, _ in self.boxes(parameter):
            numbers = range(box.start[0], box.start[0] + box.size[0]) if len(box.start) == 3 else (0,)
            start, size = box.start[-2:], box.size[-2:]
            out += [Piece(name, number, (start[0], start[1]), (size[0], size[1]), self.owned) for number in numbers]
        return out

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Return the values of each piece in a tensor that lies as the parameter does."""
        return [view for _, _, values in self.boxes(tensor) for view in (values if values.ndim == 3 else [values])]


@dataclass(frozen=True)
class Place:
    """Where matrices are put together: over the ranks of `group` (None: all), on `device`."""

    group: dist.ProcessGroup | None
    device: torch.device


class MatrixUpdates(torch.optim.AdamW):
    """The part of an optimizer that updates matrices; it stands before a kind of AdamW, which updates the rest."""

    held: Mapping[Tensor, Held]
    exchange: Exchange

    def use(self, held: Mapping[Tensor, Held], place: Place) -> None:
        """Take the matrices. Collective."""
        self.held = held
        self.order = [(p, number) for p, one in held.items() for number in range(len(one.pieces(p)))]
        pieces = [piece for p, one in held.items() for piece in one.pieces(p)]
        self.exchange = Exchange(pieces, place.group, place.device)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; none where `found_inf` is 1. Collective."""
        every = self.param_groups
        self.param_groups = [group for group in every if MUON not in group]
        try:
            super().step(closure)
        finally:
            self.param_groups = every
        found: Tensor | None = getattr(self, "found_inf", None)
        if found is None or not bool(found):
            self._step_matrices()

    def __str__(self) -> str:
        """Return its name for logs."""
        rest = type(self).__mro__[2]
        return f"Muon for {len(self.held)} parameters beside {rest.__module__.partition('.')[0]}'s {rest.__name__}"

    def momentum_like(self, parameter: Tensor) -> Tensor:
        """Return a momentum of zeros."""
        return torch.zeros_like(parameter)

    def _step_matrices(self) -> None:
        groups = {p: group for group in self.param_groups if MUON in group for p in group["params"]}
        sources: dict[Tensor, tuple[list[Tensor], list[Tensor], float]] = {}
        weights: dict[Tensor, tuple[list[Tensor], float]] = {}
        scale: Tensor | None = getattr(self, "grad_scale", None)

        def scaled(grad: Tensor) -> Tensor:
            return grad if scale is None else grad / scale.to(grad.device, grad.dtype)

        for p, group in groups.items():
            if p.grad is None:
                continue
            grad, state = scaled(local(p.grad)), self._state_of(p)
            momentum, mu = local(state[MOMENTUM]), group["momentum"]
            near = momentum.to(grad.device, grad.dtype)
            near.lerp_(grad, 1 - mu)
            if near is not momentum:
                momentum.copy_(near)
            state["step"] += 1
            held = self.held[p]
            sources[p] = held.views(p.grad), held.views(state[MOMENTUM]), mu
            local(p).mul_(1 - group["lr"] * group["weight_decay"])
            weights[p] = held.views(p.detach()), group["lr"]

        def read(piece: int) -> Tensor:
            p, number = self.order[piece]
            if p not in sources:
                return torch.zeros(self.exchange.own[piece].size)
            grads, moments, mu = sources[p]
            grad = scaled(grads[number])
            return grad.lerp(moments[number].to(grad.device, grad.dtype), mu)

        def take(piece: int, result: Tensor, shape: Pair) -> None:
            p, number = self.order[piece]
            if p in weights:
                views, lr = weights[p]
                views[number].add_(result.to(views[number].device), alpha=-lr * rate_ratio(*shape))

        self.exchange.run(read, take)

    def _state_of(self, parameter: Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=local(parameter).device)
            state[MOMENTUM] = self.momentum_like(parameter)
        return state


class Muon(MatrixUpdates):
    """Muon beside torch's fused AdamW."""


class BFloat16Muon(MatrixUpdates, BFloat16AdamW):
    """Muon beside an AdamW of bfloat16 moments: its momentum is kept in bfloat16 too."""

    def momentum_like(self, parameter: Tensor) -> Tensor:
        """See `MatrixUpdates`."""
        return torch.zeros_like(parameter, dtype=torch.bfloat16)


class HostMuon(MatrixUpdates, HostAdamW):
    """Muon beside an AdamW of moments in host memory: its momentum is kept there too."""

    def momentum_like(self, parameter: Tensor) -> Tensor:
        """See `MatrixUpdates`."""
        return on_host(parameter)


def with_matrices(kind: type[torch.optim.AdamW]) -> type[MatrixUpdates]:
    """Return Muon beside this kind of AdamW."""
    return {BFloat16AdamW: BFloat16Muon, HostAdamW: HostMuon}.get(kind, Muon)


def moments_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[str, ...]:
    """Return the names of a parameter's states, beside its number of steps."""
    muon = isinstance(optimizer, MatrixUpdates) and parameter in optimizer.held
    return (MOMENTUM,) if muon else MOMENTS


def local(tensor: Any) -> Tensor:
    """Return this rank's shard of a tensor, or the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
