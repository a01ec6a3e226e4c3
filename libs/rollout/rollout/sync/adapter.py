"""Weight sync by low-rank pairs alone: the receiver has the base, and adds them to it itself.

W = base + scale * B A for the weight of every layer of an adapter (Hu et al. 2021, arXiv 2106.09685). The base is what
the tensors held when the first adapter came; it is kept (a copy of these layers' weights) until whole weights come in
its place.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollout.errors import NotFiniteError

PARTS = ("lora_A", "lora_B")


@dataclass(frozen=True)
class Adapter:
    """Description of low-rank pairs, which are sent as `LAYER.lora_A` (rank, in) and `LAYER.lora_B` (out, rank).

    `layers`: names of the linear layers whose `weight` they are added to.
    """

    rank: int
    scale: float
    layers: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.layers:
            raise ValueError(f"an adapter has a rank of at least 1 and some layers, got {self.rank} and {self.layers}")

    def pairs(self, targets: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return empty tensors of the expected pairs, by name. Raise ValueError for a layer that is no matrix of the
        model."""
        expected: dict[str, Tensor] = {}
        for layer in self.layers:
            weight = targets.get(f"{layer}.weight")
            if weight is None or weight.ndim != 2:
                raise ValueError(f"an adapter of {layer!r}: this model has no matrix {layer}.weight")
            low, high = (self.rank, weight.shape[1]), (weight.shape[0], self.rank)
            for part, shape in zip(PARTS, (low, high), strict=True):
                expected[f"{layer}.{part}"] = torch.empty(shape, dtype=torch.float32, device=weight.device)
        return expected


class AdaptedWeights:
    """The base of weights that have, or had, an adapter."""

    def __init__(self) -> None:
        self._base: dict[str, Tensor] = {}

    @torch.no_grad()
    def merged(self, adapter: Adapter, pairs: Mapping[str, Tensor], current: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the weights with this adapter, by name; the base of layers that only an earlier adapter had.

        `current`: those in use, which are the base of layers that had no adapter so far. Sums are taken in float32.
        Raises NotFiniteError for a sum that is too large for a weight's type.
        """
        adapted = {f"{layer}.weight": layer for layer in adapter.layers}
        for name in adapted:
            if name not in self._base:
                self._base[name] = current[name].detach().clone()
        merged: dict[str, Tensor] = {}
        for name, base in self._base.items():
            layer = adapted.get(name)
            if layer is None:
                merged[name] = base.clone()
                continue
            low, high = (pairs[f"{layer}.{part}"] for part in PARTS)
            merged[name] = (base.float() + (high @ low) * adapter.scale).to(base.dtype)
            if not bool(torch.stack(torch.aminmax(merged[name])).isfinite().all()):
                raise NotFiniteError(
                    f"{name} is not finite with its adapter: weights that are not finite are not taken"
                )
        return merged

    def forget(self) -> None:
        """Drop the base: whole weights have come, which are the base of the next adapter."""
        self._base.clear()
